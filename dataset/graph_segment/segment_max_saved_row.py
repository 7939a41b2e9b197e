"""Maximum over the rows of each segment, a column at a time: pooling points into voxels or regions.

Forward    y_sd = max over the rows i of segment s of x_id, the first of equal ones; 0 for an empty segment
Backward   dx_id = dy_sd if row i won column d of its segment s, else 0

Forward schedule: a program owns (segment, column tile), walks its rows a tile at a time, and saves which row
won each column, counted from the segment's first: that fits 32 bits wherever the segment lies.
Backward schedule: a row is in one segment, so the segment's owner may write all of its rows. It holds dy and
the winners of its columns in registers, two reads whatever the length, and its walk only writes: each row
gets dy where its number is the winner's, and zeros. Every dx is stored once, in whole tiles; scattering dy to
the winners would be fewer numbers, but into a buffer that a pass of its own has filled with zeros before.

op: segment_max
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 16, "BLOCK_D": 64}


@triton.jit
def segment_max_kernel(
    x_ptr, offsets_ptr, y_ptr, winner_ptr, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + s)
    rows = (tl.load(offsets_ptr + s + 1) - begin).to(tl.int32)
    best = tl.full([BLOCK_D], -float("inf"), dtype=tl.float32)
    winner = tl.full([BLOCK_D], -1, dtype=tl.int32)
    for start in range(0, rows, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        mask = (i[:, None] < rows) & (d[None, :] < D)
        offs = (begin + i[:, None]) * D + d[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
        top = tl.max(x, axis=0)
        at = tl.where((i[:, None] < rows) & (x == top[None, :]), i[:, None], rows)
        wins = (top > best) | (winner < 0)
        best = tl.where(wins, top, best)
        winner = tl.where(wins, tl.min(at, axis=0), winner)
    y = tl.where(winner >= 0, best, 0.0)
    tl.store(y_ptr + s * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(winner_ptr + s * D + d, winner, mask=d < D)


def segment_max_forward(x, offsets):
    S, D = offsets.numel() - 1, x.shape[1]
    y = torch.empty((S, D), device=x.device, dtype=x.dtype)
    winner = torch.empty((S, D), device=x.device, dtype=torch.int32)
    segment_max_kernel[(S, triton.cdiv(D, TILE["BLOCK_D"]))](x, offsets, y, winner, D, **TILE)
    return y, winner


@autodiff(inputs_require_grad=(0,))
def segment_max(x, offsets):
    """x: (rows, D); offsets: int64 (segments + 1), from 0 to rows, not decreasing."""
    return segment_max_forward(x.contiguous(), offsets.contiguous())[0]


def reference(x, offsets):
    S, (rows, D) = offsets.numel() - 1, x.shape
    segment = torch.repeat_interleave(torch.arange(S, device=x.device), offsets.diff())
    index, zero = segment[:, None].expand(rows, D), x.new_zeros(S, D)
    best = zero.scatter_reduce(0, index, x.detach(), "amax", include_self=False)
    wins = torch.where(x == best[segment], torch.arange(rows, device=x.device)[:, None], rows)
    first = torch.full_like(zero, rows, dtype=torch.int64).scatter_reduce(0, index, wins, "amin")
    return torch.cat([x, x.new_zeros(1, D)]).gather(0, first)


SWEEP = [{"S": 2048, "rows": 65536, "D": 128}, {"S": 701, "rows": 20011, "D": 200}]
SWEEP_CPU = [{"S": 9, "rows": 50, "D": 17}, {"S": 4, "rows": 90, "D": 67}]


def make_args(dims, device="cuda", dtype=torch.float32):
    S, rows = dims["S"], dims["rows"]
    inner = torch.randint(0, rows + 1, (max(0, S - 1),), device=device).sort().values
    offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((min(1, S),), rows)])
    return torch.randn(rows if S else 0, dims["D"], device=device, dtype=dtype), offsets


# ---- backward ----


@triton.jit
def segment_max_backward_kernel(
    winner_ptr, offsets_ptr, dy_ptr, dx_ptr, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + s)
    rows = (tl.load(offsets_ptr + s + 1) - begin).to(tl.int32)
    winner = tl.load(winner_ptr + s * D + d, mask=d < D, other=-1)
    dy = tl.load(dy_ptr + s * D + d, mask=d < D, other=0.0)
    for start in range(0, rows, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        mask = (i[:, None] < rows) & (d[None, :] < D)
        dx = tl.where(i[:, None] == winner[None, :], dy[None, :], 0.0)
        tl.store(dx_ptr + (begin + i[:, None]) * D + d[None, :], dx, mask=mask)


class SegmentMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets):
        offsets = offsets.contiguous()
        y, winner = segment_max_forward(x.contiguous(), offsets)
        ctx.save_for_backward(winner, offsets)
        ctx.x_shape = x.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        winner, offsets = ctx.saved_tensors
        S, D = winner.shape
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        segment_max_backward_kernel[(S, triton.cdiv(D, TILE["BLOCK_D"]))](
            winner, offsets, dy.contiguous(), dx, D, **TILE
        )
        return dx, None


def segment_max_autograd(x, offsets):
    return SegmentMax.apply(x, offsets)
