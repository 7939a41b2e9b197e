"""Every row has the same gradient: a kernel makes one, and it is returned expanded over the rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def share_kernel(dy_ptr, dx_ptr, M, N, dy_stride, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + cols * dy_stride, mask=cols < N, other=0.0)
    tl.store(dx_ptr + cols, dy / M, mask=cols < N)


class ColumnMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return column_mean(x)

    @staticmethod
    def backward(ctx, dy):
        M, N = ctx.shape
        row = torch.empty(N, device=dy.device, dtype=dy.dtype)
        share_kernel[(triton.cdiv(N, 32),)](dy, row, M, N, dy.stride(0), BLOCK=32)
        return row.expand(M, N)


def column_mean_autograd(x):
    return ColumnMean.apply(x)
