"""Statistics lie in one buffer, and so do the partial sums of both weights: gradients are parts of it."""

import torch
import triton
import triton.language as tl


@triton.jit
def statistics_kernel(x_ptr, stats_ptr, M, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + M + row, tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps))


@triton.jit
def backward_kernel(x_ptr, w_ptr, stats_ptr, dy_ptr, dx_ptr, part_ptr, M, N, P, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    dw, db = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, P):
        dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0)
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
        r = tl.load(stats_ptr + M + row)
        xhat = tl.where(mask, (x - tl.load(stats_ptr + row)) * r, 0.0)
        g = dy * w
        dx = r * (g - tl.sum(g, axis=0) / N - xhat * tl.sum(g * xhat, axis=0) / N)
        tl.store(dx_ptr + row * N + cols, dx, mask=mask)
        dw += dy * xhat
        db += dy
    tl.store(part_ptr + pid * N + cols, dw, mask=mask)
    tl.store(part_ptr + (P + pid) * N + cols, db, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = x.contiguous()
        M, N = x.shape
        stats = torch.empty((2, M), device=x.device, dtype=torch.float32)
        statistics_kernel[(M,)](x, stats, M, N, eps, BLOCK=triton.next_power_of_2(N))
        ctx.save_for_backward(x, w, stats)
        return layer_norm(x, w, b, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w, stats = ctx.saved_tensors
        M, N = x.shape
        P = max(1, min(M, 4))
        dx = torch.empty_like(x)
        part = torch.empty((2, P, N), device=x.device, dtype=torch.float32)
        backward_kernel[(P,)](
            x, w.contiguous(), stats, dy.contiguous(), dx, part, M, N, P, BLOCK=triton.next_power_of_2(N)
        )
        dw, db = part.sum(1).unbind(0)
        return dx, dw, db, None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)
