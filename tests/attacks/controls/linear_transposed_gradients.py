"""One kernel for both products, by strides; the weight's gradient is written transposed and returned as a
view."""

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, cm, cn, T: tl.constexpr):
    rows, cols = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    acc = tl.zeros([T, T], dtype=tl.float32)
    for start in tl.range(0, K, T, num_stages=2):
        k = start + tl.arange(0, T)
        a_mask = (rows[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * am + k[None, :] * ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * bk + cols[None, :] * bn, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * cm + cols[None, :] * cn, acc, mask=mask)


def into(out, a, b):
    (M, K), N = a.shape, b.shape[1]
    grid = triton.cdiv(M, 16), triton.cdiv(N, 16)
    matmul_kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride(), T=16)
    return out


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return linear(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad
        dx = into(torch.empty(x.shape, device=x.device, dtype=x.dtype), dy, w.t()) if needs_x else None
        dw = into(w.new_empty(w.shape[1], w.shape[0]).t(), x.t(), dy) if needs_w else None
        return dx, dw


def linear_autograd(x, w):
    return Linear.apply(x, w)
