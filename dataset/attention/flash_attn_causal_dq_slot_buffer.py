"""Causal flash attention whose backward rebuilds the scores once and is deterministic: dQ by slots.

Forward    S = s Q K^T, P = softmax(S with S_ij = -inf for j > i), O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  delta_i = <dO_i, O_i>,
           dQ_i = s sum_j dS_ij K_j,  dK = s dS^T Q

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal with an online
softmax; it saves lse, in units of log2.
Backward schedule: the owner of key tile j keeps dK and dV in registers and walks the query tiles i >= j; the
same tile of dS gives its share of dQ_i, which goes to a slot of its own, (i, j). A second kernel adds the
slots of each query tile. So P is rebuilt once (five dots a tile, not seven), and unlike atomics the order of
each sum is fixed. The price is memory: T (T + 1) / 2 slots for T tiles, that is (T + 1) / 2 times dQ in fp32;
with key tiles of 128 and sequences of a few thousand this is in reach, beyond that two ownerships are better.
The slots are packed by query tile, slot (i, j) at i (i + 1) / 2 + j: no slot is empty and what a query
tile's owner reads is one stretch of memory.

op: causal_attention
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
    """Tiles, as long as registers allow since they set the number of slots, and the precision of dots."""
    short = q.dtype != torch.float32
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    BLOCK = (128 if short else 64) // (2 if BLOCK_D > 64 else 1)
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
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
SWEEP_CPU = [{"B": 1, "H": 2, "N": 130, "D": 16}, {"B": 2, "H": 1, "N": 50, "D": 24}]


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
def slot_of(i, j, head):
    """The place of slot (i, j) of a head; there are num_programs(0) query tiles."""
    T = tl.num_programs(0).to(tl.int64)
    return head.to(tl.int64) * (T * (T + 1) // 2) + i * (i + 1) // 2 + j


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, slots_ptr, dk_ptr, dv_ptr, N, D, scale, scale_log2,
    QUERIES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * N
    cols, d = j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for i in range(j, tl.num_programs(0)):
        rows = i * BLOCK + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = (cols[None, :] <= rows[:, None]) & (rows[:, None] < N)
        p = tl.exp2(tl.where(visible, s - lse[:, None], -float("inf")))
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        if QUERIES:
            share = tl.dot(ds, k, input_precision=PRECISION)
            slot = slots_ptr + slot_of(i, j, tl.program_id(1)) * BLOCK * D
            store_tile(slot, share, tl.arange(0, BLOCK), d, BLOCK, D)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def slot_sum_kernel(slots_ptr, dq_ptr, N, D, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * N
    own, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    slot = slots_ptr + slot_of(i, 0, tl.program_id(1)) * BLOCK * D
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for _ in range(i + 1):
        dq += load_tile(slot, own, d, BLOCK, D)
        slot += BLOCK * D
    store_tile(dq_ptr + head * D, dq * scale, i * BLOCK + own, d, N, D)


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
        tiles, needs, scale = tiling(q), ctx.needs_input_grad, D**-0.5
        BLOCK, BLOCK_D = tiles["BLOCK"], tiles["BLOCK_D"]
        T = triton.cdiv(N, BLOCK)
        delta, dq, dk, dv = (torch.empty_like(tensor) for tensor in (lse, q, k, v))
        slots = lse.new_empty((B * H * T * (T + 1) // 2, BLOCK, D) if needs[0] else 0)
        delta_kernel[(triton.cdiv(B * H * N, BLOCK),)](
            o, do, delta, B * H * N, D, BLOCK=BLOCK, BLOCK_D=BLOCK_D
        )
        key_kernel[(T, B * H)](
            q, k, v, do, lse, delta, slots, dk, dv, N, D, scale, scale * LOG2E, QUERIES=needs[0], **tiles
        )
        if needs[0]:
            slot_sum_kernel[(T, B * H)](slots, dq, N, D, scale, BLOCK=BLOCK, BLOCK_D=BLOCK_D)
        return tuple(g if needed else None for g, needed in zip((dq, dk, dv), needs, strict=True))


def causal_attention_autograd(q, k, v):
    return CausalAttention.apply(q, k, v)
