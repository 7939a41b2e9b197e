"""Integral image (summed-area table): every pixel becomes the sum of the rectangle above and left of it.

Forward    y_ij = sum_{a <= i, b <= j} x_ab,  which is a running sum along rows, then one along columns
Backward   x_ab stands in y_ij for all i >= a, j >= b:   dx_ab = sum_{i >= a, j >= b} dy_ij,  the same two
           sums from the right and from below

Forward schedule: one kernel for both directions. It sees a tensor as (outer, length, inner) and sums along
the middle: rows are (B Y, X, 1), columns (B, Y, X). A program owns a tile of lines and walks them in blocks
with the sums so far in registers, a few numbers a line; an image may be of any size, and is never transposed.
Backward schedule: the same kernel, blocks taken from the far end and scanned in reverse, columns first and
rows after, as the adjoint of two maps takes them in the other order. Nothing is saved.

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
def running_sum_kernel(x_ptr, y_ptr, lines, length, inner, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = line // inner * length * inner + line % inner
    blocks = tl.cdiv(length, BLOCK)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(blocks):
        i = (blocks - 1 - step if REVERSE else step) * BLOCK + tl.arange(0, BLOCK)
        mask = (i[:, None] < length) & (line[None, :] < lines)
        offs = start[None, :] + i[:, None] * inner
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, carry[None, :] + tl.cumsum(x, axis=0, reverse=REVERSE), mask=mask)
        carry += tl.sum(x, axis=0)


def running_sum(x, axis, reverse):
    y, length, inner = torch.empty_like(x), x.shape[axis], x.shape[2] if axis == 1 else 1
    lines = x.numel() // length
    grid = (triton.cdiv(lines, BLOCK),)
    running_sum_kernel[grid](x, y, lines, length, inner, REVERSE=reverse, BLOCK=BLOCK)
    return y


@autodiff(inputs_require_grad=(0,))
def integral_image(x):
    """x: (B, Y, X)."""
    return running_sum(running_sum(x.contiguous(), 2, False), 1, False)


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
        return running_sum(running_sum(dy.contiguous(), 1, True), 2, True)


def integral_image_autograd(x):
    return IntegralImage.apply(x)
