"""Causal attention with a learned prefix of keys and values that every sequence of a batch shares.

Forward    [S0, S] = s Q [K0; K]^T with S_ij = -inf for j > i,  [P0, P] = softmax of both as one row,
           O = P0 V0 + P V;  K0 and V0 are (heads, R, dim), the same for all of the batch
Backward   dS = P * (dO V^T - delta) and the same for the prefix,  delta_i = <dO_i, O_i> over both,
           dQ = s (dS0 K0 + dS K),  dK = s dS^T Q,  dV = P^T dO,
           dK0 = s sum_b dS0_b^T Q_b,  dV0 = sum_b P0_b^T dO_b

Forward schedule: a program owns a tile of queries. It walks the prefix, which no mask hides, then the tokens
up to the diagonal, with one online softmax over both; nothing is concatenated or expanded over the batch. lse
is saved, in units of log2.
Backward schedule: dQ's owner takes the same two walks. A token's key tile is met by queries from its diagonal
on, in its own sequence. A prefix tile is met by all queries of all sequences: one owner for all would walk
the whole batch while most of the GPU is idle, as a prefix is a tile or two a head. So its program is a pair
of (prefix tile, sequence) and stores a part; a last kernel adds the parts over the batch. With lse and delta
over both, either walk knows nothing of the other.

op: prefix_kv_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores(q, k, rows, cols, n_keys, scale_log2, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if CAUSAL:
        return tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
    else:
        return tl.where(cols[None, :] < n_keys, s, -float("inf"))


@triton.jit
def attend(
    q, k_ptr, v_ptr, m, total, acc, rows, end, n_keys, D, scale_log2,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax, taken over the keys up to end."""
    d = tl.arange(0, BLOCK_D)
    for start in range(0, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, n_keys, D)
        v = load_tile(v_ptr, cols, d, n_keys, D)
        s = scores(q, k, rows, cols, n_keys, scale_log2, CAUSAL, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@triton.jit
def prefix_kernel(
    q_ptr, k_ptr, v_ptr, k0_ptr, v0_ptr, o_ptr, lse_ptr, H, N, R, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    prefix = (tl.program_id(1) % H).to(tl.int64) * R * D
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    m, total, acc = attend(
        q, k0_ptr + prefix, v0_ptr + prefix, m, total, acc, rows, R, R, D, scale_log2,
        False, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    end = tl.minimum(first + BLOCK, N)
    m, total, acc = attend(
        q, k_ptr + head * D, v_ptr + head * D, m, total, acc, rows, end, N, D, scale_log2,
        True, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def prefix_forward(q, k, v, k0, v0):
    (B, H, N, D), R = q.shape, k0.shape[1]
    if not q.shape == k.shape == v.shape or not k0.shape == v0.shape == (H, R, D):
        raise ValueError("q, k and v must have one shape, and the prefix their heads and dimension")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    prefix_kernel[grid](q, k, v, k0, v0, o, lse, H, N, R, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def prefix_kv_attention(q, k, v, k0, v0):
    """q, k, v: (batch, heads, tokens, dim); k0, v0: (heads, R, dim)."""
    return prefix_forward(*(tensor.contiguous() for tensor in (q, k, v, k0, v0)))[0]


def reference(q, k, v, k0, v0):
    (B, _, N, D), R = q.shape, k0.shape[1]
    keys, values = (torch.cat([p.expand(B, -1, -1, -1), t], dim=2) for p, t in ((k0, k), (v0, v)))
    future = torch.ones(N, N + R, device=q.device, dtype=torch.bool).triu(1 + R)
    s = (D**-0.5 * q @ keys.transpose(-1, -2)).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ values


SWEEP = [
    {"B": 8, "H": 12, "N": 1024, "R": 64, "D": 64},
    {"B": 3, "H": 8, "N": 777, "R": 20, "D": 128},
]
SWEEP_CPU = [
    {"B": 3, "H": 2, "N": 27, "R": 6, "D": 16},
    {"B": 1, "H": 1, "N": 40, "R": 34, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, R, D = (dims[key] for key in ("B", "H", "N", "R", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, *(torch.randn(H, R, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(
    q, k, v, do, lse, delta, rows, cols, n_keys, scale_log2, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, rows, cols, n_keys, scale_log2, CAUSAL, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def walk_keys(
    q, k_ptr, v_ptr, do, lse, delta, dq, rows, end, n_keys, D, scale_log2,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(0, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, n_keys, D)
        v = load_tile(v_ptr, cols, d, n_keys, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, n_keys, scale_log2, CAUSAL, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, k0_ptr, v0_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, R, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    prefix = (tl.program_id(1) % H).to(tl.int64) * R * D
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dq = walk_keys(
        q, k0_ptr + prefix, v0_ptr + prefix, do, lse, delta, dq, rows, R, R, D, scale_log2,
        False, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    end = tl.minimum(first + BLOCK, N)
    dq = walk_keys(
        q, k_ptr + head * D, v_ptr + head * D, do, lse, delta, dq, rows, end, N, D, scale_log2,
        True, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, n_keys, D, scale, scale_log2,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile, from the queries of one sequence: of tokens, or a part of the prefix's."""
    head = tl.program_id(1).to(tl.int64) * N
    own = tl.program_id(1).to(tl.int64) * n_keys * D
    if CAUSAL:
        key_at, begin = own, tl.program_id(0) * BLOCK
    else:
        key_at, begin = (tl.program_id(1) % H).to(tl.int64) * n_keys * D, 0
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + key_at, cols, d, n_keys, D)
    v = load_tile(v_ptr + key_at, cols, d, n_keys, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(begin, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, n_keys, scale_log2, CAUSAL, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + own, dk * scale, cols, d, n_keys, D)
    store_tile(dv_ptr + own, dv, cols, d, n_keys, D)


@triton.jit
def batch_sum_kernel(parts_ptr, total_ptr, B, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(B):
        acc += tl.load(parts_ptr + at, mask=at < size, other=0.0)
        parts_ptr += size
    tl.store(total_ptr + at, acc.to(total_ptr.dtype.element_ty), mask=at < size)


class PrefixKVAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, k0, v0):
        q, k, v, k0, v0 = (tensor.contiguous() for tensor in (q, k, v, k0, v0))
        o, lse = prefix_forward(q, k, v, k0, v0)
        ctx.save_for_backward(q, k, v, k0, v0, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, k0, v0, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), R, tiles = q.shape, k0.shape[1], tiling(q)
        BLOCK, scale = tiles["BLOCK"], D**-0.5
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        grads = [torch.empty_like(tensor) for tensor in (q, k, v, k0, v0)]
        dq, dk, dv, dk0, dv0 = grads
        rest = (D, scale, scale * LOG2E)
        if needs[0]:
            query_kernel[(triton.cdiv(N, BLOCK), B * H)](
                q, k, v, k0, v0, do, lse, delta, dq, H, N, R, *rest, **tiles
            )
        if needs[1] or needs[2]:
            key_kernel[(triton.cdiv(N, BLOCK), B * H)](
                q, k, v, do, lse, delta, dk, dv, H, N, N, *rest, CAUSAL=True, **tiles
            )
        if needs[3] or needs[4]:
            parts = lse.new_empty((2, B, H, R, D))
            key_kernel[(triton.cdiv(R, BLOCK), B * H)](
                q, k0, v0, do, lse, delta, parts[0], parts[1], H, N, R, *rest, CAUSAL=False, **tiles
            )
            for part, total in zip(parts, (dk0, dv0), strict=True):
                batch_sum_kernel[(triton.cdiv(H * R * D, 256),)](part, total, B, H * R * D, BLOCK=256)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def prefix_kv_attention_autograd(q, k, v, k0, v0):
    return PrefixKVAttention.apply(q, k, v, k0, v0)
