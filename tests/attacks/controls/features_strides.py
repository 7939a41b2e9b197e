"""One strided matmul kernel for both gradients, whatever the size of their rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, a_m, a_k, b_k, b_n, T: tl.constexpr):
    rows, cols = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    acc = tl.zeros([T, T], dtype=tl.float32)
    for start in range(0, K, T):
        k = start + tl.arange(0, T)
        a_mask = (rows[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * a_m + k[None, :] * a_k, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_k + cols[None, :] * b_n, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul_into(a, b, out):
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    matmul_kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), T=16)
    return out


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return features(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dw = ctx.needs_input_grad
        dx = matmul_into(dy, w.t(), torch.empty(x.shape, device=x.device, dtype=x.dtype)) if dx else None
        dw = matmul_into(x.t(), dy, torch.empty(w.shape, device=w.device, dtype=w.dtype)) if dw else None
        return dx, dw


def features_autograd(x, w):
    return Linear.apply(x, w)
