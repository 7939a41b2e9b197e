"""Sum of the rows of each segment, segments being runs of rows of any length.

Forward    y_s = sum over the rows i with first_s <= i < first_{s+1} of x_i
Backward   dx_i = dy_{s(i)},  s(i) the segment of row i

Forward schedule: a program owns (segment, tile of columns) and walks its rows a few at a time; a segment of
no rows stores zeros.
Backward schedule: a segment's owner could write its rows, but segments differ in length by orders, and one
program would write while others have long finished. A copy has no need of owners by segment: a program owns
a tile of rows, all of one size, and each row finds its segment by a binary search among the beginnings, some
twenty steps in a table that the cache holds; a segment of no rows is never found. No index of all rows is
made or saved; dy's rows come from the cache too, where neighbours share a segment.

op: segment_sum
schedule: gather_transpose
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def segment_sum_kernel(x_ptr, first_ptr, y_ptr, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    end = tl.load(first_ptr + s + 1)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(tl.load(first_ptr + s), end, ROWS):
        i = start + tl.arange(0, ROWS)
        mask = (i[:, None] < end) & (d[None, :] < D)
        total += tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + s * D + d, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty), mask=d < D)


@autodiff(inputs_require_grad=(0,))
def segment_sum(x, first):
    """x: (rows, D); first: int64 (segments + 1), from 0 to rows, not decreasing; gives (segments, D)."""
    (_, D), segments = x.shape, first.numel() - 1
    y = torch.empty((segments, D), device=x.device, dtype=x.dtype)
    grid = (segments, triton.cdiv(D, 64))
    segment_sum_kernel[grid](x.contiguous(), first.contiguous(), y, D, ROWS=16, COLS=64)
    return y


def reference(x, first):
    segment = torch.repeat_interleave(torch.arange(first.numel() - 1, device=x.device), first.diff())
    return x.new_zeros(first.numel() - 1, x.shape[1]).index_add(0, segment, x)


SWEEP = [{"segments": 20000, "rows": 1000000, "D": 128}, {"segments": 301, "rows": 50021, "D": 75}]
SWEEP_CPU = [{"segments": 11, "rows": 63, "D": 20}, {"segments": 4, "rows": 90, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Segments of uneven lengths, some of none."""
    segments, rows = dims["segments"], dims["rows"] if dims["segments"] else 0
    place = (segments * torch.rand(rows, device=device) ** 3).long().clamp(max=segments - 1)
    first = torch.searchsorted(place.sort().values, torch.arange(segments + 1, device=device))
    return torch.randn(rows, dims["D"], device=device, dtype=dtype), first


# ---- backward ----


@triton.jit
def spread_kernel(
    dy_ptr, first_ptr, dx_ptr, rows, segments, steps, D, ROWS: tl.constexpr, COLS: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], dtype=tl.int64)  # first[low] <= i < first[high], for rows that there are
    high = low + segments
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(first_ptr + middle) <= i
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (i[:, None] < rows) & (d[None, :] < D)
    dy = tl.load(dy_ptr + low[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dy, mask=mask)


class SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first):
        first = first.contiguous()
        ctx.save_for_backward(first)
        ctx.rows = x.shape[0]
        return segment_sum(x, first)

    @staticmethod
    def backward(ctx, dy):
        (first,) = ctx.saved_tensors
        (segments, D), rows = dy.shape, ctx.rows
        dx = torch.empty((rows, D), device=dy.device, dtype=dy.dtype)
        steps = max(1, segments).bit_length()
        spread_kernel[(triton.cdiv(rows, 32), triton.cdiv(D, 64))](
            dy.contiguous(), first, dx, rows, segments, steps, D, ROWS=32, COLS=64
        )
        return dx, None


def segment_sum_autograd(x, first):
    return SegmentSum.apply(x, first)
