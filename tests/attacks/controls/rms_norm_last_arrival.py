"""dw by whichever program comes last: it knows from a counter of arrivals that all partial rows are there."""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_backward_kernel(
    x_ptr, w_ptr, dy_ptr, dx_ptr, part_ptr, dw_ptr, count_ptr, M, N, eps, BLOCK: tl.constexpr
):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    g = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)
    dx = r * g - x * (r * r * r / N) * tl.sum(g * x, axis=0)
    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)
    tl.store(part_ptr + row * N + cols, dy * x * r, mask=cols < N)
    arrived = tl.atomic_add(count_ptr, 1)
    if arrived == M - 1:
        dw = tl.zeros([BLOCK], dtype=tl.float32)
        for other in range(M):
            dw += tl.load(part_ptr + other * N + cols, mask=cols < N, other=0.0)
        tl.store(dw_ptr + cols, dw, mask=cols < N)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x = x.contiguous()
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return rms_norm(x, w, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        M, N = x.shape
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        part = torch.empty((M, N), device=x.device, dtype=torch.float32)
        count = torch.zeros(1, device=x.device, dtype=torch.int32)
        block = triton.next_power_of_2(N)
        rms_norm_backward_kernel[(M,)](x, w, dy.contiguous(), dx, part, dw, count, M, N, ctx.eps, BLOCK=block)
        return dx, dw, None


def rms_norm_autograd(x, w, eps=1e-6):
    return RmsNorm.apply(x, w, eps)
