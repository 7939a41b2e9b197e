"""Recommender attention (HSTU) whose scores have a learned bias for how long ago an event was.

Forward    a sequence, a head:  Z_ij = s <q_i, k_j> + T[c, h] with edges[c] <= t_i - t_j < edges[c + 1],
           A_ij = silu(Z_ij) / L for j <= i,  O = A V;  the last bucket has no end
Backward   dZ_ij = silu'(Z_ij) <dO_i, V_j> / L,  silu'(z) = g + z g (1 - g) with g = sigmoid(z),
           dV = A^T dO,  dQ = s dZ K,  dK = s dZ^T Q,
           dT[c, h] = sum of dZ_ij over the pairs of bucket c, in all sequences

Forward schedule: a program owns a query tile of a sequence and walks the keys up to the diagonal. A tile of
keys far back has one bucket or two; it takes the least and the greatest difference in the tile, finds their
buckets, and sets the bias by as many comparisons as lie between: no gather from the table, no logarithm, and
integers compare exactly. Nothing needs timestamps to be sorted, but sorted ones meet few buckets a tile.
Backward schedule: the pairs of a bucket are where the data say, so no program can own a bucket. The query
tile's owner, who makes dQ, has each dZ once and adds it, bucket by bucket of those its tile meets, to a
histogram with a lane a bucket, in registers. It stores the histogram once; a kernel adds those of a head.
Atomics into T would have all programs wait for a few addresses. Key tiles own dK and dV.

op: hstu_attention
schedule: swap_owner, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


def tile_table(offsets, tokens, BLOCK):
    """int64 (tiles, 2): sequence and first row of each tile; the sequence is -1 beyond the last one."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    entry = torch.arange(tokens // BLOCK + tiles.numel(), device=offsets.device)
    sequence = torch.searchsorted(tiles.cumsum(0), entry, right=True)
    known = sequence.clamp(max=tiles.numel() - 1)
    first = offsets[known] + (entry - (tiles.cumsum(0) - tiles)[known]) * BLOCK
    return torch.stack([torch.where(sequence < tiles.numel(), sequence, -1), first], dim=1)


@triton.jit
def load_tile(ptr, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def ages(t_ptr, edges_ptr, rows, cols, seen, end, C, LANES: tl.constexpr):
    """t_i - t_j of a tile, 0 where not seen, and the first and last bucket that it meets."""
    ti = tl.load(t_ptr + rows, mask=rows < end, other=0)
    tj = tl.load(t_ptr + cols, mask=cols < end, other=0)
    age = tl.where(seen, ti[:, None] - tj[None, :], 0)
    lane = tl.arange(0, LANES)
    edges = tl.load(edges_ptr + lane, mask=(lane > 0) & (lane < C), other=0)
    inner = (lane > 0) & (lane < C)
    first = tl.sum((inner & (edges <= tl.min(age))).to(tl.int32), axis=0)
    last = tl.sum((inner & (edges <= tl.max(age))).to(tl.int32), axis=0)
    return age, first, last


@triton.jit
def biased_scores(q, k, table_ptr, edges_ptr, age, first, last, H, scale, PRECISION: tl.constexpr):
    bias = tl.zeros_like(age).to(tl.float32) + tl.load(table_ptr + first * H).to(tl.float32)
    for c in range(first + 1, last + 1):
        later = tl.load(table_ptr + c * H).to(tl.float32)
        bias = tl.where(age >= tl.load(edges_ptr + c), later, bias)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias


@triton.jit
def hstu_kernel(
    q_ptr, k_ptr, v_ptr, t_ptr, table_ptr, edges_ptr, o_ptr, offsets_ptr, tiles_ptr, C, H, D, scale, longest,
    LANES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    if sequence >= 0:
        first_row = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        end = tl.load(offsets_ptr + sequence + 1)
        h = tl.program_id(1)
        rows, d = first_row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        q = load_tile(q_ptr + h * D, rows, d, end, H * D, D)
        acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        for start in range(tl.load(offsets_ptr + sequence), first_row + 1, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + h * D, cols, d, end, H * D, D)
            v = load_tile(v_ptr + h * D, cols, d, end, H * D, D)
            seen = (cols[None, :] <= rows[:, None]) & (rows[:, None] < end)
            age, first, last = ages(t_ptr, edges_ptr, rows, cols, seen, end, C, LANES)
            z = biased_scores(q, k, table_ptr + h, edges_ptr, age, first, last, H, scale, PRECISION)
            a = tl.where(seen, z * tl.sigmoid(z), 0.0)
            acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)
        store_tile(o_ptr + h * D, acc / longest, rows, d, end, H * D, D)


@autodiff(inputs_require_grad=(0, 1, 2, 4))
def hstu_time_attention(q, k, v, t, table, edges, offsets, longest):
    """q, k, v: (tokens, heads, dim); t: int64 (tokens); table: (buckets, heads); edges: int64 (buckets),
    where each begins, ascending (the first begins anywhere); offsets: int64 (sequences + 1), from 0 to
    tokens.
    """
    q, k, v, t, table = q.contiguous(), k.contiguous(), v.contiguous(), t.contiguous(), table.contiguous()
    (T, H, D), C = q.shape, edges.numel()
    if not q.shape == k.shape == v.shape or t.shape != (T,) or table.shape != (C, H) or C == 0:
        raise ValueError("q, k and v must have one shape, t a number a token, table a row a bucket")
    if D > 128 or longest <= 0:
        raise ValueError(f"a head of {D} does not fit one tile, or {longest} is no length")
    o, tiles = torch.empty_like(q), tiling(q)
    entries = tile_table(offsets, T, tiles["BLOCK"])
    hstu_kernel[(entries.shape[0], H)](
        q, k, v, t, table, edges, o, offsets, entries, C, H, D, D**-0.5, longest,
        LANES=triton.next_power_of_2(C), **tiles,
    )  # fmt: skip
    return o


def reference(q, k, v, t, table, edges, offsets, longest):
    outputs = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        qs, ks, vs = (tensor[begin:end].transpose(0, 1) for tensor in (q, k, v))
        age = t[begin:end, None] - t[None, begin:end]
        bias = table[torch.searchsorted(edges[1:], age, right=True)].permute(2, 0, 1)
        z = q.shape[-1] ** -0.5 * qs @ ks.transpose(1, 2) + bias
        outputs.append((torch.nn.functional.silu(z).tril() / longest @ vs).transpose(0, 1))
    return torch.cat(outputs)


SWEEP = [
    {"L0": 2048, "L1": 811, "L2": 1777, "H": 8, "C": 24, "D": 64},
    {"L0": 1000, "L1": 0, "L2": 1501, "H": 4, "C": 20, "D": 128},
]
SWEEP_CPU = [
    {"L0": 12, "L1": 34, "L2": 0, "H": 2, "C": 6, "D": 16},
    {"L0": 0, "L1": 1, "L2": 40, "H": 1, "C": 9, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    L = [dims[f"L{i}"] for i in range(3)]
    lengths = torch.tensor(L, device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    q, k, v = (torch.randn(sum(L), dims["H"], dims["D"], device=device, dtype=dtype) for _ in range(3))
    t = torch.randint(0, 50, (sum(L),), device=device).cumsum(0)  # sorted, with ties
    table = torch.randn(dims["C"], dims["H"], device=device, dtype=dtype)
    edges = 2 ** torch.arange(dims["C"], device=device) - 1  # floor(log2(age + 1))
    return (q, k, v, t, table, edges, offsets), {"longest": float(max(L))}


# ---- backward ----


@triton.jit
def rebuild_a_dz(z, v, do, seen, PRECISION: tl.constexpr):
    """A and dZ of one tile, both times L, rows of queries by columns of keys."""
    da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    g = tl.sigmoid(z)
    return tl.where(seen, z * g, 0.0), tl.where(seen, da * (g + z * g * (1 - g)), 0.0)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, t_ptr, table_ptr, edges_ptr, do_ptr, offsets_ptr, tiles_ptr, dq_ptr, part_ptr,
    C, H, D, scale, longest,
    LANES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    h, lane = tl.program_id(1), tl.arange(0, LANES)
    sums = tl.zeros([LANES], dtype=tl.float32)
    if sequence >= 0:
        first_row = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        end = tl.load(offsets_ptr + sequence + 1)
        rows, d = first_row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        q = load_tile(q_ptr + h * D, rows, d, end, H * D, D)
        do = load_tile(do_ptr + h * D, rows, d, end, H * D, D)
        dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        for start in range(tl.load(offsets_ptr + sequence), first_row + 1, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + h * D, cols, d, end, H * D, D)
            v = load_tile(v_ptr + h * D, cols, d, end, H * D, D)
            seen = (cols[None, :] <= rows[:, None]) & (rows[:, None] < end)
            age, first, last = ages(t_ptr, edges_ptr, rows, cols, seen, end, C, LANES)
            z = biased_scores(q, k, table_ptr + h, edges_ptr, age, first, last, H, scale, PRECISION)
            _, dz = rebuild_a_dz(z, v, do, seen, PRECISION)
            dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
            rest = tl.sum(dz)  # of the buckets from c on
            for c in range(first, last):
                later = tl.sum(tl.where(age >= tl.load(edges_ptr + c + 1), dz, 0.0))
                sums += tl.where(lane == c, rest - later, 0.0)
                rest = later
            sums += tl.where(lane == last, rest, 0.0)
        store_tile(dq_ptr + h * D, dq * (scale / longest), rows, d, end, H * D, D)
    part = h * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + part * C + lane, sums / longest, mask=lane < C)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, t_ptr, table_ptr, edges_ptr, do_ptr, offsets_ptr, tiles_ptr, dk_ptr, dv_ptr,
    C, H, D, scale, longest,
    LANES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    if sequence >= 0:
        first_col = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        end = tl.load(offsets_ptr + sequence + 1)
        h = tl.program_id(1)
        cols, d = first_col + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        k = load_tile(k_ptr + h * D, cols, d, end, H * D, D)
        v = load_tile(v_ptr + h * D, cols, d, end, H * D, D)
        dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        for start in range(first_col, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            q = load_tile(q_ptr + h * D, rows, d, end, H * D, D)
            do = load_tile(do_ptr + h * D, rows, d, end, H * D, D)
            seen = (cols[None, :] <= rows[:, None]) & (rows[:, None] < end)
            age, first, last = ages(t_ptr, edges_ptr, rows, cols, seen, end, C, LANES)
            z = biased_scores(q, k, table_ptr + h, edges_ptr, age, first, last, H, scale, PRECISION)
            a, dz = rebuild_a_dz(z, v, do, seen, PRECISION)
            dv = tl.dot(tl.trans(a.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
        store_tile(dk_ptr + h * D, dk * (scale / longest), cols, d, end, H * D, D)
        store_tile(dv_ptr + h * D, dv / longest, cols, d, end, H * D, D)


@triton.jit
def table_kernel(part_ptr, dtable_ptr, G, C, H, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Sum of parts (H, G, C) over the programs G, a program a head."""
    h, lane = tl.program_id(0), tl.arange(0, LANES)
    acc = tl.zeros([BLOCK, LANES], dtype=tl.float32)
    for start in range(0, G, BLOCK):
        g = start + tl.arange(0, BLOCK)
        mask = (g[:, None] < G) & (lane[None, :] < C)
        acc += tl.load(part_ptr + (h * G + g[:, None]) * C + lane[None, :], mask=mask, other=0.0)
    dtable = tl.sum(acc, axis=0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + lane * H + h, dtable, mask=lane < C)


class HSTUTimeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, t, table, edges, offsets, longest):
        q, k, v, t, table = (tensor.contiguous() for tensor in (q, k, v, t, table))
        ctx.save_for_backward(q, k, v, t, table, edges, offsets)
        ctx.longest = longest
        return hstu_time_attention(q, k, v, t, table, edges, offsets, longest)

    @staticmethod
    def backward(ctx, do):
        q, k, v, t, table, edges, offsets = ctx.saved_tensors
        (T, H, D), C, tiles, needs = q.shape, edges.numel(), tiling(q), ctx.needs_input_grad
        entries, LANES = tile_table(offsets, T, tiles["BLOCK"]), triton.next_power_of_2(C)
        G = entries.shape[0]
        seen = (q, k, v, t, table, edges, do.contiguous(), offsets, entries)
        rest = (C, H, D, D**-0.5, ctx.longest)
        dq = dk = dv = dtable = None
        if needs[0] or needs[4]:
            dq = torch.empty_like(q)
            part = torch.empty((H, G, C), device=q.device, dtype=torch.float32)
            query_kernel[(G, H)](*seen, dq, part, *rest, LANES=LANES, **tiles)
            if needs[4]:
                dtable = torch.empty_like(table)
                table_kernel[(H,)](part, dtable, G, C, H, BLOCK=32, LANES=LANES)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(G, H)](*seen, dk, dv, *rest, LANES=LANES, **tiles)
        dq, dk, dv = (grad if needed else None for grad, needed in zip((dq, dk, dv), needs, strict=False))
        return dq, dk, dv, None, dtable, None, None, None


def hstu_time_attention_autograd(q, k, v, t, table, edges, offsets, longest):
    return HSTUTimeAttention.apply(q, k, v, t, table, edges, offsets, longest)
