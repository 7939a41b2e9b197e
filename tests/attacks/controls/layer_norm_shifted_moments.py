"""Recomputes statistics in one pass from two moments of what is left when a row's first element is taken off:
exact for a constant row. dw and db by partial rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def backward_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    x = tl.where(mask, x - tl.load(x_ptr + row * N), 0.0)
    mean = tl.sum(x, axis=0) / N
    var = tl.maximum(tl.sum(x * x, axis=0) / N - mean * mean, 0.0)
    r = 1 / tl.sqrt(var + eps)
    xhat = tl.where(mask, (x - mean) * r, 0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0)
    g = dy * tl.load(w_ptr + cols, mask=mask, other=0.0)
    dx = r * (g - tl.sum(g, axis=0) / N - xhat * tl.sum(g * xhat, axis=0) / N)
    tl.store(dx_ptr + row * N + cols, dx, mask=mask)
    tl.store(dw_ptr + row * N + cols, dy * xhat, mask=mask)
    tl.store(db_ptr + row * N + cols, dy, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return layer_norm(x, w, b, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        x = x.contiguous()
        M, N = x.shape
        dx, dw, db = (torch.empty((M, N), device=x.device, dtype=x.dtype) for _ in range(3))
        block = triton.next_power_of_2(N)
        backward_kernel[(M,)](x, w, dy.contiguous(), dx, dw, db, N, ctx.eps, BLOCK=block)
        return dx, dw.sum(0), db.sum(0), None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)
