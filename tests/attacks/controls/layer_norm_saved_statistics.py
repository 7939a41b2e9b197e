"""A forward kernel of its own saves mean and reciprocal deviation; atomics for dw and db."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    w, b = tl.load(w_ptr + cols, mask=mask, other=0.0), tl.load(b_ptr + cols, mask=mask, other=0.0)
    tl.store(mean_ptr + row, mean)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * N + cols, centred * r * w + b, mask=mask)


@triton.jit
def backward_kernel(x_ptr, w_ptr, mean_ptr, r_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0)
    r = tl.load(r_ptr + row)
    xhat = tl.where(mask, (x - tl.load(mean_ptr + row)) * r, 0.0)
    g = dy * tl.load(w_ptr + cols, mask=mask, other=0.0)
    dx = r * (g - tl.sum(g, axis=0) / N - xhat * tl.sum(g * xhat, axis=0) / N)
    tl.store(dx_ptr + row * N + cols, dx, mask=mask)
    tl.atomic_add(dw_ptr + cols, dy * xhat, mask=mask)
    tl.atomic_add(db_ptr + cols, dy, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = x.contiguous()
        M, N = x.shape
        y = torch.empty_like(x)
        mean, r = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
        forward_kernel[(M,)](x, w, b, y, mean, r, N, eps, BLOCK=triton.next_power_of_2(N))
        ctx.save_for_backward(x, w, mean, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mean, r = ctx.saved_tensors
        M, N = x.shape
        dx, dw, db = torch.empty_like(x), torch.zeros_like(w), torch.zeros_like(w)
        backward_kernel[(M,)](x, w, mean, r, dy.contiguous(), dx, dw, db, N, BLOCK=triton.next_power_of_2(N))
        return dx, dw, db, None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)
