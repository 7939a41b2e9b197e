"""Integral image (summed-area table): every pixel becomes the sum of the rectangle above and left of it.

Forward    y_ij = sum_{a <= i, b <= j} x_ab,  which is a running sum along rows, then one along columns
Backward   x_ab stands in y_ij for all i >= a, j >= b:   dx_ab = sum_{i >= a, j >= b} dy_ij,  the same two
           sums from the right and from below

Forward schedule: two passes of one shape. For rows, a program owns a tile of rows and walks it in blocks of
columns with the row sums so far in registers; for columns, a tile of columns in blocks of rows. Both load
tiles whose fast axis is the memory's, so that columns need no transposed copy; the image may be of any size.
Backward schedule: the mirror, with the blocks taken from the far end and scanned in reverse, and columns
first, since the adjoint of two maps takes them in the other order (here they commute, but a fused neighbour
would not). Nothing is saved, the table least of all.

op: integral_image
schedule: reverse_scan
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 32


@triton.jit
def rows_kernel(x_ptr, y_ptr, R, X, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums along rows; the rows of all images are R."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.cdiv(X, BLOCK)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(blocks):
        cols = (blocks - 1 - step if REVERSE else step) * BLOCK + tl.arange(0, BLOCK)
        mask = (rows[:, None] < R) & (cols[None, :] < X)
        offs = rows[:, None] * X + cols[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, carry[:, None] + tl.cumsum(x, axis=1, reverse=REVERSE), mask=mask)
        carry += tl.sum(x, axis=1)


@triton.jit
def columns_kernel(x_ptr, y_ptr, Y, X, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums along the columns of image program_id(1)."""
    image = tl.program_id(1).to(tl.int64) * Y * X
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.cdiv(Y, BLOCK)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(blocks):
        rows = (blocks - 1 - step if REVERSE else step) * BLOCK + tl.arange(0, BLOCK)
        mask = (rows[:, None] < Y) & (cols[None, :] < X)
        offs = image + rows[:, None] * X + cols[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, carry[None, :] + tl.cumsum(x, axis=0, reverse=REVERSE), mask=mask)
        carry += tl.sum(x, axis=0)


@autodiff(inputs_require_grad=(0,))
def integral_image(x):
    """x: (B, Y, X)."""
    x = x.contiguous()
    B, Y, X = x.shape
    along_rows, y = torch.empty_like(x), torch.empty_like(x)
    rows_kernel[(triton.cdiv(B * Y, BLOCK),)](x, along_rows, B * Y, X, REVERSE=False, BLOCK=BLOCK)
    columns_kernel[(triton.cdiv(X, BLOCK), B)](along_rows, y, Y, X, REVERSE=False, BLOCK=BLOCK)
    return y


def reference(x):
    return x.cumsum(2).cumsum(1)


SWEEP = [{"B": 64, "Y": 512, "X": 512}, {"B": 5, "Y": 1021, "X": 1530}]
SWEEP_CPU = [{"B": 2, "Y": 13, "X": 45}, {"B": 1, "Y": 70, "X": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["Y"], dims["X"], device=device, dtype=dtype),)


# ---- backward ----


class IntegralImage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return integral_image(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        B, Y, X = dy.shape
        along_columns, dx = torch.empty_like(dy), torch.empty_like(dy)
        columns_kernel[(triton.cdiv(X, BLOCK), B)](dy, along_columns, Y, X, REVERSE=True, BLOCK=BLOCK)
        rows_kernel[(triton.cdiv(B * Y, BLOCK),)](along_columns, dx, B * Y, X, REVERSE=True, BLOCK=BLOCK)
        return dx


def integral_image_autograd(x):
    return IntegralImage.apply(x)
