"""Attention with a learned bias for each bucket of distances, as in T5: near ones exactly, far ones coarsely.

Forward    S_ij = s <q_i, k_j> + table[c, h] with edges[c] <= j - i < edges[c + 1],  P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           dtable[c, h] = sum of dS_ij over the diagonals j - i of bucket c, and the batch

Forward schedule: a bias depends on j - i alone, so a small kernel spreads the table over the 2 N - 1
diagonals of a head; no N x N bias exists. A program owns a query tile, walks the keys with an online softmax,
and reads the bias of an element at its diagonal. lse is saved, in units of log2.
Backward schedule: dQ has query tiles as owners, dK and dV key tiles. The table's gradient rides with dQ, as
its owner has each dS in registers once. Buckets are stretches of diagonals, and a tile knows from its two
outermost diagonals which buckets it meets: far from the main diagonal it is one, and the tile is added up
whole; near it they are a handful, and each is picked out by a comparison. The sums gather in a vector with a
lane a bucket, in registers, and are stored once a program; a last kernel adds programs and batch. Atomics on
the table would have all programs of a head wait for the bucket of "far".

op: relative_bias_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


def bucket_of_diagonal(edges, N):
    """int32 (2 N - 1): the bucket of each j - i, from -(N - 1)."""
    diagonal = torch.arange(1 - N, N, device=edges.device, dtype=edges.dtype)
    return torch.searchsorted(edges, diagonal, right=True).to(torch.int32) - 1


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def spread_kernel(table_ptr, bucket_ptr, bias_ptr, H, R, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bucket = tl.load(bucket_ptr + at, mask=at < R, other=0)
    bias = tl.load(table_ptr + bucket * H + tl.program_id(1), mask=at < R, other=0.0)
    tl.store(bias_ptr + tl.program_id(1) * R + at, bias.to(tl.float32), mask=at < R)


@triton.jit
def scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2, -inf beyond the last key."""
    inside = (rows[:, None] < N) & (cols[None, :] < N)
    bias = tl.load(bias_ptr + cols[None, :] - rows[:, None] + N - 1, mask=inside, other=0.0)
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias) * LOG2E
    return tl.where(cols[None, :] < N, s, -float("inf"))


@triton.jit
def relative_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr, lse_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    bias_ptr += tl.program_id(1) % H * (2 * N - 1)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def relative_bias_forward(q, k, v, table, edges):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or table.shape != (edges.numel() - 1, H):
        raise ValueError("q, k and v must have one shape, and table a row for each bucket between edges")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles, R = torch.empty_like(q), tiling(q), max(0, 2 * N - 1)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    bias, bucket = lse.new_empty((H, R)), bucket_of_diagonal(edges, N)
    spread_kernel[(triton.cdiv(R, 256), H)](table, bucket, bias, H, R, BLOCK=256)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    relative_bias_kernel[grid](q, k, v, bias, o, lse, H, N, D, D**-0.5, **tiles)
    return o, lse, bias, bucket


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def relative_bias_attention(q, k, v, table, edges):
    """q, k, v: (batch, heads, tokens, dim); table: (buckets, heads); edges: int64 (buckets + 1), ascending,
    the first and the last beyond any distance.
    """
    return relative_bias_forward(*(tensor.contiguous() for tensor in (q, k, v, table, edges)))[0]


def reference(q, k, v, table, edges):
    i = torch.arange(q.shape[2], device=q.device)
    bucket = torch.searchsorted(edges, i - i[:, None], right=True) - 1
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + table[bucket].permute(2, 0, 1)
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 4, "H": 12, "N": 1024, "C": 32, "D": 64},
    {"B": 2, "H": 8, "N": 777, "C": 20, "D": 128},
]
SWEEP_CPU = [
    {"B": 2, "H": 2, "N": 34, "C": 8, "D": 16},
    {"B": 1, "H": 1, "N": 66, "C": 6, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, C, D = (dims[key] for key in ("B", "H", "N", "C", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    half = C // 2  # on either side: distances one by one, then in steps that grow, up to 128
    exact = (half + 1) // 2
    steps = [exact * (128 / max(1, exact)) ** (n / max(1, half - exact)) for n in range(half - exact)]
    near = [*range(exact), *(round(step) for step in steps)]
    inner = [-n for n in near[::-1]] + [n + 1 for n in near]
    edges = torch.tensor([-(2**40), *inner[: max(0, C - 1)], 2**40], device=device)
    return q, k, v, torch.randn(edges.numel() - 1, H, device=device, dtype=dtype), edges


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def add_by_bucket(
    ds, bucket_ptr, rows, cols, first_row, first_col, sums, N, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """sums, a lane a bucket, and the elements of ds added to the lanes of their diagonals."""
    lowest = tl.maximum(first_col - tl.minimum(first_row + BLOCK, N) + 1, 1 - N)
    highest = tl.minimum(first_col + BLOCK, N) - 1 - first_row
    first = tl.load(bucket_ptr + lowest + N - 1)
    last = tl.load(bucket_ptr + highest + N - 1)
    lane = tl.arange(0, LANES)
    if first == last:
        sums += tl.where(lane == first, tl.sum(ds), 0.0)
    else:
        inside = (rows[:, None] < N) & (cols[None, :] < N)
        bucket = tl.load(bucket_ptr + cols[None, :] - rows[:, None] + N - 1, mask=inside, other=-1)
        for c in range(first, last + 1):
            sums += tl.where(lane == c, tl.sum(tl.where(bucket == c, ds, 0.0)), 0.0)
    return sums


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, bucket_ptr, dq_ptr, part_ptr,
    C, H, N, D, scale,
    LANES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    bias_ptr += tl.program_id(1) % H * (2 * N - 1)
    first_row = tl.program_id(0) * BLOCK
    rows, d = first_row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        sums = add_by_bucket(ds, bucket_ptr, rows, cols, first_row, start, sums, N, BLOCK, LANES)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    lane = tl.arange(0, LANES)
    tl.store(part_ptr + part * C + lane, sums, mask=lane < C)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    bias_ptr += tl.program_id(1) % H * (2 * N - 1)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def table_kernel(part_ptr, dtable_ptr, B, H, T, C, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Sum of parts (B, H, T, C) over batch and tiles, a program a head."""
    h, lane = tl.program_id(0), tl.arange(0, LANES)
    acc = tl.zeros([BLOCK, LANES], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = (i // T * H + h) * T + i % T
        mask = (i[:, None] < B * T) & (lane[None, :] < C)
        acc += tl.load(part_ptr + part[:, None] * C + lane[None, :], mask=mask, other=0.0)
    dtable = tl.sum(acc, axis=0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + lane * H + h, dtable, mask=lane < C)


class RelativeBiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, table, edges):
        q, k, v, table, edges = (tensor.contiguous() for tensor in (q, k, v, table, edges))
        o, lse, bias, bucket = relative_bias_forward(q, k, v, table, edges)
        ctx.save_for_backward(q, k, v, table, o, lse, bias, bucket)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, table, o, lse, bias, bucket = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), C, tiles = q.shape, table.shape[0], tiling(q)
        T, LANES = triton.cdiv(N, tiles["BLOCK"]), triton.next_power_of_2(C)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, bias, do, lse, delta)
        dq = dk = dv = dtable = None
        if needs[0] or needs[3]:
            dq, part = torch.empty_like(q), lse.new_empty((B, H, T, C))
            query_kernel[(T, B * H)](*seen, bucket, dq, part, C, H, N, D, D**-0.5, LANES=LANES, **tiles)
            if needs[3]:
                dtable = torch.empty_like(table)
                table_kernel[(H,)](part, dtable, B, H, T, C, BLOCK=32, LANES=LANES)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(T, B * H)](*seen, dk, dv, H, N, D, D**-0.5, **tiles)
        dq, dk, dv = (grad if needed else None for grad, needed in zip((dq, dk, dv), needs, strict=False))
        return dq, dk, dv, dtable, None


def relative_bias_attention_autograd(q, k, v, table, edges):
    return RelativeBiasAttention.apply(q, k, v, table, edges)
