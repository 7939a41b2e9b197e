"""Input of a sequential recommender: item vectors of packed histories, plus embeddings of place and of age.

Forward    y_i = s x_i + P[pos_i] + T[bucket_i],  pos_i = min(i - begin of i's sequence, rows of P - 1),
           s a constant and bucket_i the given class of the time since the event
Backward   dx_i = s dy_i;  dP[p] = sum over the i with pos_i = p of dy_i;  dT[b] = sum over those of bucket b

Forward schedule: a program owns a tile of packed rows and of columns; each row finds its sequence by
bisection of the offsets.
Backward schedule: places and buckets are both known lists of rows, but of different kinds. Place p < last has
at most one row a sequence, at begin + p: its owner needs no list at all, it walks the sequences and takes the
rows that exist; only the last place, where long sequences are cut, has all rows from there on, so its owner
walks each sequence's rest. A bucket's rows are anywhere: one sort of the buckets, then its owner gathers.
Every row of both tables has one owner, so no atomics, although all sequences share the first places and most
events fall into few buckets; dx is made by a third kernel that copies and scales.

op: position_time_embedding
schedule: segment_gather, gather_transpose, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 16, "BLOCK_D": 128}


@triton.jit
def embed_kernel(
    x_ptr, place_ptr, time_ptr, offsets_ptr, bucket_ptr, y_ptr, rows, B, D, last, scale,
    BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.zeros([BLOCK_R], dtype=tl.int64)
    for bit in tl.static_range(BITS):  # the last sequence that begins at i or before
        later = b + (1 << (BITS - 1 - bit))
        begin = tl.load(offsets_ptr + later, mask=later < B, other=0)
        b = tl.where((later < B) & (begin <= i), later, b)
    pos = tl.minimum(i - tl.load(offsets_ptr + b, mask=i < rows, other=0), last)
    bucket = tl.load(bucket_ptr + i, mask=i < rows, other=0)
    mask = (i[:, None] < rows) & (d[None, :] < D)
    x = tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    place = tl.load(place_ptr + pos[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    time = tl.load(time_ptr + bucket[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = scale * x + place + time
    tl.store(y_ptr + i[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def embed_history(x, place, time, offsets, bucket, scale):
    """x: (rows, D); place: (places, D); time: (buckets, D); offsets: int64 (B + 1), from 0 to rows; bucket:
    int64 (rows)."""
    (rows, D), B = x.shape, offsets.numel() - 1
    if rows and place.shape[0] < 1:
        raise ValueError("there is no place to embed")
    y = torch.empty((rows, D), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(rows, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
    embed_kernel[grid](
        x.contiguous(), place.contiguous(), time.contiguous(), offsets.contiguous(), bucket.contiguous(), y,
        rows, B, D, place.shape[0] - 1, scale, BITS=(B - 1).bit_length(), **TILE,
    )  # fmt: skip
    return y


def reference(x, place, time, offsets, bucket, scale):
    lengths = offsets.diff()
    begin = torch.repeat_interleave(offsets[:-1], lengths)
    pos = (torch.arange(x.shape[0], device=x.device) - begin).clamp(max=place.shape[0] - 1)
    return scale * x + place[pos] + time[bucket]


SWEEP = [
    {"B": 256, "L": 1024, "places": 1024, "buckets": 128, "D": 256},
    {"B": 701, "L": 200, "places": 150, "buckets": 61, "D": 100},
]
SWEEP_CPU = [
    {"B": 3, "L": 19, "places": 12, "buckets": 5, "D": 24},
    {"B": 6, "L": 9, "places": 20, "buckets": 3, "D": 140},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, L, D, buckets = dims["B"], dims["L"], dims["D"], dims["buckets"]
    lengths = torch.randint(0, L + 1, (B,), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rows = int(offsets[-1])
    x = torch.randn(rows, D, device=device, dtype=dtype)
    place, time = (torch.randn(dims[n], D, device=device, dtype=dtype) for n in ("places", "buckets"))
    bucket = (torch.rand(rows, device=device) ** 3 * buckets).long()
    return x, place, time, offsets, bucket, D**0.5


# ---- backward ----


@triton.jit
def scale_kernel(dy_ptr, dx_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, (scale * dy).to(dx_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def add_rows(acc, dy_ptr, row, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    return acc + tl.load(dy_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def place_kernel(
    dy_ptr, offsets_ptr, dplace_ptr, B, D, last, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    pos = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    if pos < last:
        for start in range(0, B, BLOCK_R):
            b = start + tl.arange(0, BLOCK_R)
            row = tl.load(offsets_ptr + b, mask=b < B, other=0) + pos
            end = tl.load(offsets_ptr + b + 1, mask=b < B, other=0)
            acc = add_rows(acc, dy_ptr, row, row < end, d, D)
    else:
        for b in range(B):
            end = tl.load(offsets_ptr + b + 1)
            for start in range(tl.load(offsets_ptr + b) + pos, end, BLOCK_R):
                row = start + tl.arange(0, BLOCK_R)
                acc = add_rows(acc, dy_ptr, row, row < end, d, D)
    dplace = tl.sum(acc, axis=0).to(dplace_ptr.dtype.element_ty)
    tl.store(dplace_ptr + pos * D + d, dplace, mask=d < D)


@triton.jit
def bucket_kernel(
    dy_ptr, begin_ptr, order_ptr, dtime_ptr, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    bucket = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(begin_ptr + bucket + 1)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(begin_ptr + bucket), end, BLOCK_R):
        at = start + tl.arange(0, BLOCK_R)
        row = tl.load(order_ptr + at, mask=at < end, other=0)
        acc = add_rows(acc, dy_ptr, row, at < end, d, D)
    dtime = tl.sum(acc, axis=0).to(dtime_ptr.dtype.element_ty)
    tl.store(dtime_ptr + bucket * D + d, dtime, mask=d < D)


class EmbedHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place, time, offsets, bucket, scale):
        offsets, bucket = offsets.contiguous(), bucket.contiguous()
        ctx.save_for_backward(offsets, bucket)
        ctx.sizes = place.shape[0], time.shape[0], scale
        return embed_history(x, place, time, offsets, bucket, scale)

    @staticmethod
    def backward(ctx, dy):
        offsets, bucket = ctx.saved_tensors
        (places, buckets, scale), needs = ctx.sizes, ctx.needs_input_grad
        dy, D, wide = dy.contiguous(), dy.shape[1], triton.cdiv(dy.shape[1], TILE["BLOCK_D"])
        dx = dplace = dtime = None
        if needs[0]:
            dx = torch.empty_like(dy)
            scale_kernel[(triton.cdiv(dy.numel(), 1024),)](dy, dx, dy.numel(), scale, BLOCK=1024)
        if needs[1]:
            dplace = torch.empty((places, D), device=dy.device, dtype=dy.dtype)
            place_kernel[(places, wide)](dy, offsets, dplace, offsets.numel() - 1, D, places - 1, **TILE)
        if needs[2]:
            dtime = torch.empty((buckets, D), device=dy.device, dtype=dy.dtype)
            order = torch.argsort(bucket, stable=True)
            begin = torch.searchsorted(bucket[order], torch.arange(buckets + 1, device=dy.device))
            bucket_kernel[(buckets, wide)](dy, begin, order, dtime, D, **TILE)
        return dx, dplace, dtime, None, None, None


def embed_history_autograd(x, place, time, offsets, bucket, scale):
    return EmbedHistory.apply(x, place, time, offsets, bucket, scale)
