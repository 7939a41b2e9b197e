"""Length regulator of a speech model: row i is repeated as many times as its predicted duration says.

Forward    y_t = x_i with end_{i-1} <= t < end_i,  end the running sum of the durations, which may be 0
Backward   dx_i = sum of dy_t over end_{i-1} <= t < end_i

Forward schedule: a program owns a tile of output rows and columns. Each row looks for its i by bisection of
`end`, as the first with end_i > t, so no index list of the output's length is made.
Backward schedule: what was a copy to many becomes a sum, and the frames of a row lie side by side: its owner
walks from end_{i-1} to end_i and stores once. Output owners would have to add by atomics instead. Durations
are short and differ, so a program owns a tile of input rows, which walk in step, each within its own span,
and the tile ends with the longest; loads of one step are independent of each other, and so wait together. A
duration of 0 gets its zero from the same store.

op: repeat_interleave
schedule: segment_gather
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 16, "BLOCK_D": 64}


@triton.jit
def repeat_kernel(
    x_ptr, end_ptr, y_ptr, rows, frames, D, BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i = tl.zeros([BLOCK_R], dtype=tl.int64)  # the number of rows that end at or before t
    for bit in tl.static_range(BITS):
        more = i + (1 << (BITS - 1 - bit))
        end = tl.load(end_ptr + more - 1, mask=more <= rows, other=0)
        i = tl.where((more <= rows) & (end <= t), more, i)
    mask = (t[:, None] < frames) & (d[None, :] < D)
    x = tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def repeat_rows(x, end, frames):
    """x: (rows, D); end: int64 (rows), the running sum of durations; frames: the last of them, or fewer."""
    x, (rows, D) = x.contiguous(), x.shape
    y = torch.empty((frames, D), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(frames, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
    repeat_kernel[grid](x, end.contiguous(), y, rows, frames, D, BITS=rows.bit_length(), **TILE)
    return y


def reference(x, end, frames):
    return torch.repeat_interleave(x, torch.diff(end, prepend=end.new_zeros(1)), dim=0)[:frames]


SWEEP = [{"rows": 16384, "longest": 16, "D": 384}, {"rows": 4099, "longest": 41, "D": 250}]
SWEEP_CPU = [{"rows": 14, "longest": 7, "D": 26}, {"rows": 40, "longest": 2, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    rows = dims["rows"]
    end = torch.randint(0, dims["longest"] + 1, (rows,), device=device).cumsum(0)
    return torch.randn(rows, dims["D"], device=device, dtype=dtype), end, int(end[-1]) if rows else 0


# ---- backward ----


@triton.jit
def repeat_backward_kernel(
    dy_ptr, end_ptr, dx_ptr, rows, frames, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(end_ptr + i - 1, mask=(i > 0) & (i < rows), other=0)
    end = tl.minimum(tl.load(end_ptr + i, mask=i < rows, other=0), frames)
    dx = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for step in range(tl.max(end - begin, axis=0)):
        mask = (begin + step < end)[:, None] & (d[None, :] < D)
        dy = tl.load(dy_ptr + (begin[:, None] + step) * D + d[None, :], mask=mask, other=0.0)
        dx += dy.to(tl.float32)
    mask = (i[:, None] < rows) & (d[None, :] < D)
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, end, frames):
        end = end.contiguous()
        ctx.save_for_backward(end)
        return repeat_rows(x, end, frames)

    @staticmethod
    def backward(ctx, dy):
        (end,) = ctx.saved_tensors
        (frames, D), rows = dy.shape, end.numel()
        dx = torch.empty((rows, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(rows, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
        repeat_backward_kernel[grid](dy.contiguous(), end, dx, rows, frames, D, **TILE)
        return dx, None, None


def repeat_rows_autograd(x, end, frames):
    return RepeatRows.apply(x, end, frames)
