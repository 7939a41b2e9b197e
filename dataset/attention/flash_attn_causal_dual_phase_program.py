"""Causal flash attention whose backward is one launch: a program is first a key owner, then a query owner.

Forward    S = s Q K^T, P = softmax(S with S_ij = -inf for j > i), O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  delta_i = <dO_i, O_i>,
           dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns tile i of the queries. Keys left of its diagonal square are walked without a
mask, the square itself with one, in steps narrower than a tile; lse is saved, in units of log2.
Backward schedule: dK and dV want owners of keys, dQ wants owners of queries. With T tiles, the owner of key
tile i walks T - i tiles of queries and the owner of query tile i walks i + 1 tiles of keys: each alone is a
triangle, in which some programs do T times the work of others. Program i does both, one after the other, so
each has T + 1 tiles to walk and all end together, in one launch, without atomics and in a fixed order. The
registers of the first phase are free again in the second. Both phases take the diagonal square in masked
steps and the rest in unmasked ones. Rows beyond the end have lse = +inf, so their P is 0 without a mask.
delta is read by programs of both phases and stays a prologue.

op: causal_attention
schedule: swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q):
    """Tiles and the precision of dots: what a program owns is BLOCK long, what it walks goes by STEP."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "STEP": BLOCK // 2, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend(
    q, k_ptr, v_ptr, m, total, acc, rows, begin, end, N, D, scale_log2,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax, taken over the keys from begin to end."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, STEP):
        cols = start + tl.arange(0, STEP)
        k = load_tile(k_ptr, cols, d, N, D)
        v = load_tile(v_ptr, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    k_ptr += head * D
    v_ptr += head * D
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    m, total, acc = attend(
        q, k_ptr, v_ptr, m, total, acc, rows, 0, first, N, D, scale_log2, False, PRECISION, STEP, BLOCK_D
    )
    end = tl.minimum(first + BLOCK, N)
    m, total, acc = attend(
        q, k_ptr, v_ptr, m, total, acc, rows, first, end, N, D, scale_log2, True, PRECISION, STEP, BLOCK_D
    )
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def attention_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    attention_kernel[grid](q, k, v, o, lse, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def causal_attention(q, k, v):
    """q, k, v: (batch, heads, tokens, dim)."""
    return attention_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    N, D = q.shape[-2:]
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 3, "N": 80, "D": 32}, {"B": 2, "H": 1, "N": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


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
    q, k, v, do, lse, delta, rows, cols, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def walk_queries(
    q_ptr, k, v, do_ptr, lse_ptr, delta_ptr, dk, dv, cols, begin, end, N, D, scale_log2,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, STEP):
        rows = start + tl.arange(0, STEP)
        q = load_tile(q_ptr, rows, d, N, D)
        do = load_tile(do_ptr, rows, d, N, D)
        lse = tl.load(lse_ptr + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, scale_log2, MASKED, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def walk_keys(
    q, k_ptr, v_ptr, do, lse, delta, dq, rows, begin, end, N, D, scale_log2,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, STEP):
        cols = start + tl.arange(0, STEP)
        k = load_tile(k_ptr, cols, d, N, D)
        v = load_tile(v_ptr, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, scale_log2, MASKED, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, N, D, scale, scale_log2,
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    q_ptr += head * D
    k_ptr += head * D
    v_ptr += head * D
    do_ptr += head * D
    lse_ptr += head
    delta_ptr += head
    first = tl.program_id(0) * BLOCK
    end = tl.minimum(first + BLOCK, N)
    own, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    if KEYS:
        k, v = load_tile(k_ptr, own, d, N, D), load_tile(v_ptr, own, d, N, D)
        dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        dk, dv = walk_queries(
            q_ptr, k, v, do_ptr, lse_ptr, delta_ptr, dk, dv, own, first, end, N, D, scale_log2,
            True, PRECISION, STEP, BLOCK_D,
        )  # fmt: skip
        dk, dv = walk_queries(
            q_ptr, k, v, do_ptr, lse_ptr, delta_ptr, dk, dv, own, first + BLOCK, N, N, D, scale_log2,
            False, PRECISION, STEP, BLOCK_D,
        )  # fmt: skip
        store_tile(dk_ptr + head * D, dk * scale, own, d, N, D)
        store_tile(dv_ptr + head * D, dv, own, d, N, D)
    if QUERIES:
        q, do = load_tile(q_ptr, own, d, N, D), load_tile(do_ptr, own, d, N, D)
        lse = tl.load(lse_ptr + own, mask=own < N, other=float("inf"))
        delta = tl.load(delta_ptr + own, mask=own < N, other=0.0)
        dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        dq = walk_keys(
            q, k_ptr, v_ptr, do, lse, delta, dq, own, first, end, N, D, scale_log2,
            True, PRECISION, STEP, BLOCK_D,
        )  # fmt: skip
        dq = walk_keys(
            q, k_ptr, v_ptr, do, lse, delta, dq, own, 0, first, N, D, scale_log2,
            False, PRECISION, STEP, BLOCK_D,
        )  # fmt: skip
        store_tile(dq_ptr + head * D, dq * scale, own, d, N, D)


class CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        tiles, needs = tiling(q), ctx.needs_input_grad
        BLOCK, BLOCK_D = tiles["BLOCK"], tiles["BLOCK_D"]
        dq, dk, dv, delta = (torch.empty_like(tensor) for tensor in (q, k, v, lse))
        delta_kernel[(triton.cdiv(B * H * N, BLOCK),)](
            o, do, delta, B * H * N, D, BLOCK=BLOCK, BLOCK_D=BLOCK_D
        )
        attention_backward_kernel[(triton.cdiv(N, BLOCK), B * H)](
            q, k, v, do, lse, delta, dq, dk, dv, N, D, D**-0.5, D**-0.5 * LOG2E,
            KEYS=needs[1] or needs[2], QUERIES=needs[0], **tiles,
        )  # fmt: skip
        return tuple(g if needed else None for g, needed in zip((dq, dk, dv), needs, strict=True))


def causal_attention_autograd(q, k, v):
    return CausalAttention.apply(q, k, v)
