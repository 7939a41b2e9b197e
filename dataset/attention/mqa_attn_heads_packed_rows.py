"""Causal multi-query attention: all query heads share one key head, and fold into the rows of a tile.

Forward    row r = i H + h of a sequence is query i of head h:  P_rj = softmax over j <= i of s <q_r, k_j>,
           O_r = sum_j P_rj V_j
Backward   dS = P * (dO V^T - delta),  delta_r = <dO_r, O_r>,  dQ = s dS K,
           dV = P^T dO,  dK = s dS^T Q: sums over rows, which are queries and heads at once

Forward schedule: K and V do not depend on the head, so a head is one more row. Q is (tokens, heads, dim), as
a projection leaves it: H consecutive rows have one query, rows are sorted by query, and the causal triangle
stays one: a tile's last row bounds its walk over the keys. Tiles are full even where a sequence has few
tokens, and K and V are read once for BLOCK / H queries of all heads. lse is saved, in units of log2.
Backward schedule: the sum over heads disappears. A key tile's owner walks the packed rows from H times its
first key on, and the reduction axis of its dots runs over (query, head) pairs: no loop over heads, no
gradients a head that would have to be added, no atomics. dQ's owner keeps the forward's tiles.

op: mqa_attention
schedule: swap_owner, recompute_from_stats
difficulty: 3
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
def mqa_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, H, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, R = tl.program_id(1).to(tl.int64), N * H
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + batch * R * D, rows, d, R, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((first + BLOCK - 1) // H + 1, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + batch * N * D, cols, d, N, D)
        v = load_tile(v_ptr + batch * N * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None] // H, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + batch * R * D, acc / total[:, None], rows, d, R, D)
    tl.store(lse_ptr + batch * R + rows, m + tl.log2(total), mask=rows < R)


def mqa_forward(q, k, v):
    B, N, H, D = q.shape
    if not k.shape == v.shape == (B, N, D):
        raise ValueError("k and v must have the tokens of q and one head")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, N, H), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N * H, tiles["BLOCK"]), B)
    mqa_kernel[grid](q, k, v, o, lse, H, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def mqa_attention(q, k, v):
    """q: (batch, tokens, heads, dim); k, v: (batch, tokens, dim)."""
    return mqa_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    N, D = q.shape[1], q.shape[3]
    s = D**-0.5 * torch.einsum("bihd,bjd->bhij", q, k)
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjd->bihd", torch.softmax(s.masked_fill(future, -float("inf")), dim=-1), v)


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 3, "H": 71, "N": 257, "D": 64}]
SWEEP_CPU = [{"B": 2, "H": 5, "N": 26, "D": 32}, {"B": 1, "H": 3, "N": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q = torch.randn(B, N, H, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, N, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, query, cols, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, packed rows by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] <= query[:, None], s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, R = tl.program_id(1).to(tl.int64), N * H
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + batch * R * D, rows, d, R, D)
    do = load_tile(do_ptr + batch * R * D, rows, d, R, D)
    lse = tl.load(lse_ptr + batch * R + rows, mask=rows < R, other=float("inf"))
    delta = tl.load(delta_ptr + batch * R + rows, mask=rows < R, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((first + BLOCK - 1) // H + 1, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + batch * N * D, cols, d, N, D)
        v = load_tile(v_ptr + batch * N * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows // H, cols, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + batch * R * D, dq * scale, rows, d, R, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, R = tl.program_id(1).to(tl.int64), N * H
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + batch * N * D, cols, d, N, D)
    v = load_tile(v_ptr + batch * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first * H, R, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + batch * R * D, rows, d, R, D)
        do = load_tile(do_ptr + batch * R * D, rows, d, R, D)
        lse = tl.load(lse_ptr + batch * R + rows, mask=rows < R, other=float("inf"))
        delta = tl.load(delta_ptr + batch * R + rows, mask=rows < R, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows // H, cols, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + batch * N * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + batch * N * D, dv, cols, d, N, D)


class MQAAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = mqa_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, N, H, D), tiles = q.shape, tiling(q)
        BLOCK, sizes = tiles["BLOCK"], (H, N, D, D**-0.5, D**-0.5 * LOG2E)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * N * H, 32),)](
            o, do, delta, B * N * H, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(triton.cdiv(N * H, BLOCK), B)](q, k, v, do, lse, delta, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(triton.cdiv(N, BLOCK), B)](q, k, v, do, lse, delta, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def mqa_attention_autograd(q, k, v):
    return MQAAttention.apply(q, k, v)
