"""Programs of one row each find the row's sum, and store the same number to one place: whoever is last. The
tiles are a second launch's."""

import torch
import triton
import triton.language as tl


@triton.jit
def sums_kernel(y_ptr, dy_ptr, sums_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(sums_ptr + row, tl.sum(y * dy, axis=0))


@triton.jit
def dx_kernel(y_ptr, dy_ptr, sums_ptr, dx_ptr, N, TILE: tl.constexpr):
    row, cols = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(dx_ptr + row * N + cols, y * (dy - tl.load(sums_ptr + row)), mask=cols < N)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        M, N = y.shape
        dy, dx = dy.contiguous(), torch.empty_like(y)
        sums = torch.empty(M, device=y.device, dtype=torch.float32)
        sums_kernel[(M, 3)](y, dy, sums, N, BLOCK=triton.next_power_of_2(N))
        dx_kernel[(M, triton.cdiv(N, 8))](y, dy, sums, dx, N, TILE=8)
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)
