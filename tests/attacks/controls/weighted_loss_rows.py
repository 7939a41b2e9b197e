"""The kernel has a Function; what the stub does by torch around it is written out, and differentiated, as it
stands there."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_energy_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, dy_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    dy = 2 * tl.load(dy_ptr + row * dy_stride)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * N + cols, dy * x, mask=cols < N)


class RowEnergy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return row_energy(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        row_energy_backward_kernel[(x.shape[0],)](x, dy, dx, x.shape[1], dy.stride(0), BLOCK=64)
        return dx


def weighted_loss_autograd(x, w, target, scale=3.0):
    x = x.contiguous()
    energy = RowEnergy.apply(x) / x.shape[1]
    weights = torch.softmax(w.float(), 0)
    off = (energy - target).clamp(min=-2.0) * scale
    return (weights * off * off).sum() + energy.mean(), energy
