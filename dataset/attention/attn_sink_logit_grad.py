"""Causal attention with a learned sink: a logit a head that takes mass and gives no value.

Forward    S = s Q K^T,  P_ij = exp(S_ij) / (exp(c) + sum_{l <= i} exp(S_il)) for j <= i,  O = P V
           (c the sink logit of the head; its share p_i = exp(c - lse_i) is dropped)
Backward   dV = P^T dO,  dP = dO V^T,  delta_i = <dO_i, O_i>.  The sink is a key whose value is zero, so its
           dP is zero and delta stays the whole row sum:
           dS = P * (dP - delta),  dc = sum_i p_i (0 - delta_i),  dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal; its online softmax
starts with the sink as the first term (maximum c, total 1) instead of an empty row. It saves lse, in log2.
Backward schedule: dc needs nothing but delta and lse, row by row. The prologue that makes delta has both in
registers, so it also stores the sum over its rows in a slot; a last kernel adds the slots of a head. The
gradient of the sink therefore costs no pass over scores. P is rebuilt from lse, which contains the sink, so
the key owners (dK, dV) and query owners (dQ) need not know of it.

op: sink_attention
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
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sink_attention_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr, H, N, D, scale_log2, LOG2E: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    c = tl.load(sink_ptr + tl.program_id(1) % H).to(tl.float32) * LOG2E
    m = tl.zeros([BLOCK_M], dtype=tl.float32) + c
    total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where((cols[None, :] <= rows[:, None]) & (cols[None, :] < N), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def sink_attention_forward(q, k, v, sink):
    if not q.shape == k.shape == v.shape or sink.shape != q.shape[1:2]:
        raise ValueError("q, k and v must have one shape, and sink a logit for each head")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    sink_attention_kernel[(triton.cdiv(N, 64), B * H)](
        q, k, v, sink, o, lse, H, N, D, D**-0.5 * LOG2E, LOG2E=LOG2E, **tiling(q)
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def sink_attention(q, k, v, sink):
    """q, k, v: (B, H, N, D); sink: (H), a natural logit beside the scaled scores."""
    return sink_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), sink.contiguous())[0]


def reference(q, k, v, sink):
    B, H, N, D = q.shape
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -float("inf"))
    s = torch.cat([s, sink[None, :, None, None].expand(B, H, N, 1)], dim=-1)
    return torch.softmax(s, dim=-1)[..., :N] @ v


SWEEP = [
    {"B": 2, "H": 16, "N": 2048, "D": 64},
    {"B": 1, "H": 8, "N": 4001, "D": 128},
]
SWEEP_CPU = [{"B": 2, "H": 3, "N": 38, "D": 16}, {"B": 1, "H": 2, "N": 97, "D": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(dims["H"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, lse_ptr, sink_ptr, delta_ptr, slots_ptr, H, N, D, LOG2E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + head * D, rows, d, N, D).to(tl.float32)
    do = load_tile(do_ptr + head * D, rows, d, N, D).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    tl.store(delta_ptr + head + rows, delta, mask=rows < N)
    c = tl.load(sink_ptr + tl.program_id(1) % H).to(tl.float32) * LOG2E
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    slot = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(slots_ptr + slot, -tl.sum(tl.exp2(c - lse) * delta))


@triton.jit
def dsink_kernel(slots_ptr, dsink_ptr, B, H, tiles, BLOCK: tl.constexpr):
    """Sum of slots (B, H, tiles) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        slot = (i // tiles * H + h) * tiles + i % tiles
        acc += tl.load(slots_ptr + slot, mask=i < B * tiles, other=0.0)
    tl.store(dsink_ptr + h, tl.sum(acc))


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    visible = (cols[None, :] <= rows[:, None]) & (rows[:, None] < N)
    p = tl.where(visible, tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, N, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink):
        q, k, v, sink = q.contiguous(), k.contiguous(), v.contiguous(), sink.contiguous()
        o, lse = sink_attention_forward(q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, sink, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        needs = ctx.needs_input_grad
        scale, scale_log2 = D**-0.5, D**-0.5 * LOG2E
        blocks = tiling(q)
        tiles = triton.cdiv(N, 64)
        delta, slots = torch.empty_like(lse), lse.new_empty((B, H, tiles))
        delta_kernel[(tiles, B * H)](
            o, do, lse, sink, delta, slots, H, N, D, LOG2E=LOG2E, BLOCK_M=64, BLOCK_D=blocks["BLOCK_D"]
        )
        dq = dk = dv = dsink = None
        if needs[0]:
            dq = torch.empty_like(q)
            dq_kernel[(tiles, B * H)](q, k, v, do, lse, delta, dq, N, D, scale, scale_log2, **blocks)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[(triton.cdiv(N, 32), B * H)](
                q, k, v, do, lse, delta, dk, dv, N, D, scale, scale_log2, **blocks
            )
        if needs[3]:
            dsink = torch.empty_like(sink)
            dsink_kernel[(H,)](slots, dsink, B, H, tiles, BLOCK=64)
        return dq, dk if needs[1] else None, dv if needs[2] else None, dsink


def sink_attention_autograd(q, k, v, sink):
    return SinkAttention.apply(q, k, v, sink)
