"""As many programs as the GPU has processors, each going over its share of the rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def resident_rows_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        share = tl.load(dy_ptr + row) / tl.load(y_ptr + row)
        tl.store(dx_ptr + row * N + cols, x * share, mask=cols < N)


class ResidentRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = resident_rows(x)
        ctx.save_for_backward(x.contiguous(), y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty_like(x)
        grid = (resident_programs(x.device),)
        block = triton.next_power_of_2(N)
        resident_rows_backward_kernel[grid](x, y, dy.contiguous(), dx, M, N, BLOCK=block)
        return dx


def resident_rows_autograd(x):
    return ResidentRows.apply(x)
