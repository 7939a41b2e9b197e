"""Differential attention: the difference of two causal softmax maps, one weighed by a learned number a head.

Forward    P1 = softmax(s Q1 K1^T),  P2 = softmax(s Q2 K2^T),  O = P1 V - c P2 V = O1 - c O2   (c = lambda)
Backward   dP1 = dO V^T =: dP,  dP2 = -c dP,  with  e = <dO, O2>  and  delta = <dO, O1>:
           dS1 = P1 * (dP - delta),    dS2 = -c P2 * (dP - e),    dV = (P1 - c P2)^T dO,
           dQ1 = s dS1 K1,  dK1 = s dS1^T Q1,  and the same for 2,    dc = -sum over batch and rows of e

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal with two online
softmaxes and two accumulators; a tile of V is loaded once for both. It saves both lse (in log2), and O1 and
O2 in float32: where one key has nearly all of a map, dS is a difference of nearly equal numbers, and a
correction of rounded outputs would be all of it.
Backward schedule: e is the row correction of the second map and, summed, the gradient of c. The prologue that
reads dO, O1 and O2 stores both corrections and a slot with its sum, so dc costs no pass over scores. In a
tile the maps share dP, and dV is one dot with P1 - c P2: key tiles take six dots, with dK1, dK2 and dV in
registers, query tiles five for dQ1 and dQ2. Two separate attentions would take eight and six, and read V and
dO twice.

op: differential_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q1, v):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D, BLOCK_E = (max(16, triton.next_power_of_2(tensor.shape[-1])) for tensor in (q1, v))
    BLOCK = 32 if q1.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "BLOCK_E": BLOCK_E, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def causal_scores(q, k, rows, cols, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    return tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))


@triton.jit
def online(s, v, m, total, acc, PRECISION: tl.constexpr):
    """One step of an online softmax."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_new, total * rescale + tl.sum(p, axis=1), acc


@triton.jit
def differential_kernel(
    q1_ptr, k1_ptr, q2_ptr, k2_ptr, v_ptr, c_ptr, o_ptr, o1_ptr, o2_ptr, lse1_ptr, lse2_ptr,
    H, N, D, E, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    c = tl.load(c_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    rows, d, e = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q1 = load_tile(q1_ptr + head * D, rows, d, N, D)
    q2 = load_tile(q2_ptr + head * D, rows, d, N, D)
    m1 = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    m2 = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total1 = tl.zeros([BLOCK], dtype=tl.float32)
    total2 = tl.zeros([BLOCK], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k1 = load_tile(k1_ptr + head * D, cols, d, N, D)
        k2 = load_tile(k2_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * E, cols, e, N, E)
        s1 = causal_scores(q1, k1, rows, cols, scale_log2, PRECISION)
        s2 = causal_scores(q2, k2, rows, cols, scale_log2, PRECISION)
        m1, total1, acc1 = online(s1, v, m1, total1, acc1, PRECISION)
        m2, total2, acc2 = online(s2, v, m2, total2, acc2, PRECISION)
    o1, o2 = acc1 / total1[:, None], acc2 / total2[:, None]
    store_tile(o_ptr + head * E, o1 - c * o2, rows, e, N, E)
    store_tile(o1_ptr + head * E, o1, rows, e, N, E)
    store_tile(o2_ptr + head * E, o2, rows, e, N, E)
    tl.store(lse1_ptr + head + rows, m1 + tl.log2(total1), mask=rows < N)
    tl.store(lse2_ptr + head + rows, m2 + tl.log2(total2), mask=rows < N)


def differential_forward(q1, k1, q2, k2, v, c):
    (B, H, N, D), E = q1.shape, v.shape[-1]
    if not q1.shape == k1.shape == q2.shape == k2.shape or v.shape != (B, H, N, E) or c.shape != (H,):
        raise ValueError("queries and keys must have one shape, and v and c fit them")
    if max(D, E) > 128:
        raise ValueError(f"head dimension {max(D, E)} does not fit one tile")
    o, (o1, o2) = torch.empty_like(v), (torch.empty_like(v, dtype=torch.float32) for _ in range(2))
    lse1, lse2 = (torch.empty((B, H, N), device=v.device, dtype=torch.float32) for _ in range(2))
    tiles = tiling(q1, v)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    made = (o, o1, o2, lse1, lse2)
    differential_kernel[grid](q1, k1, q2, k2, v, c, *made, H, N, D, E, D**-0.5 * LOG2E, **tiles)
    return made


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def differential_attention(q1, k1, q2, k2, v, c):
    """q1, k1, q2, k2: (batch, heads, tokens, D); v: (batch, heads, tokens, E); c: (heads)."""
    return differential_forward(*(tensor.contiguous() for tensor in (q1, k1, q2, k2, v, c)))[0]


def reference(q1, k1, q2, k2, v, c):
    N, D = q1.shape[-2:]
    future = torch.ones(N, N, device=v.device, dtype=torch.bool).triu(1)
    p1, p2 = (
        torch.softmax((D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -float("inf")), dim=-1)
        for q, k in ((q1, k1), (q2, k2))
    )
    return (p1 - c[:, None, None] * p2) @ v


SWEEP = [{"B": 2, "H": 8, "N": 2048, "D": 64, "E": 128}, {"B": 1, "H": 12, "N": 1531, "D": 32, "E": 64}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 40, "D": 16, "E": 32}, {"B": 2, "H": 1, "N": 31, "D": 20, "E": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D, E = (dims[key] for key in ("B", "H", "N", "D", "E"))
    q1, k1, q2, k2 = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(4))
    v = torch.randn(B, H, N, E, device=device, dtype=dtype)
    return q1, k1, q2, k2, v, 0.2 + 0.6 * torch.rand(H, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def corrections_kernel(
    o1_ptr, o2_ptr, do_ptr, delta_ptr, e_ptr, slots_ptr, N, E,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    o1 = load_tile(o1_ptr + head * E, rows, cols, N, E)
    o2 = load_tile(o2_ptr + head * E, rows, cols, N, E)
    do = load_tile(do_ptr + head * E, rows, cols, N, E).to(tl.float32)
    e = tl.sum(do * o2, axis=1)
    tl.store(e_ptr + head + rows, e, mask=rows < N)
    tl.store(delta_ptr + head + rows, tl.sum(do * o1, axis=1), mask=rows < N)
    tl.store(slots_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), -tl.sum(e))


@triton.jit
def dc_kernel(slots_ptr, dc_ptr, B, H, T, BLOCK: tl.constexpr):
    """Sum of slots (B, H, T) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(slots_ptr + (i // T * H + h) * T + i % T, mask=i < B * T, other=0.0)
    tl.store(dc_ptr + h, tl.sum(acc).to(dc_ptr.dtype.element_ty))


@triton.jit
def query_kernel(
    q1_ptr, k1_ptr, q2_ptr, k2_ptr, v_ptr, c_ptr, do_ptr, lse1_ptr, lse2_ptr, delta_ptr, e_ptr,
    dq1_ptr, dq2_ptr, H, N, D, E, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    c = tl.load(c_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    rows, d, width = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q1 = load_tile(q1_ptr + head * D, rows, d, N, D)
    q2 = load_tile(q2_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * E, rows, width, N, E)
    lse1 = tl.load(lse1_ptr + head + rows, mask=rows < N, other=float("inf"))
    lse2 = tl.load(lse2_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    e = tl.load(e_ptr + head + rows, mask=rows < N, other=0.0)
    dq1 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dq2 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = load_tile(v_ptr + head * E, cols, width, N, E)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        k1 = load_tile(k1_ptr + head * D, cols, d, N, D)
        p1 = tl.exp2(causal_scores(q1, k1, rows, cols, scale_log2, PRECISION) - lse1[:, None])
        ds1 = p1 * (dp - delta[:, None])
        dq1 = tl.dot(ds1.to(k1.dtype), k1, dq1, input_precision=PRECISION)
        k2 = load_tile(k2_ptr + head * D, cols, d, N, D)
        p2 = tl.exp2(causal_scores(q2, k2, rows, cols, scale_log2, PRECISION) - lse2[:, None])
        ds2 = p2 * (dp - e[:, None])
        dq2 = tl.dot(ds2.to(k2.dtype), k2, dq2, input_precision=PRECISION)
    store_tile(dq1_ptr + head * D, dq1 * scale, rows, d, N, D)
    store_tile(dq2_ptr + head * D, dq2 * (-c * scale), rows, d, N, D)


@triton.jit
def key_kernel(
    q1_ptr, k1_ptr, q2_ptr, k2_ptr, v_ptr, c_ptr, do_ptr, lse1_ptr, lse2_ptr, delta_ptr, e_ptr,
    dk1_ptr, dk2_ptr, dv_ptr, H, N, D, E, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    c = tl.load(c_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    cols, d, width = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k1 = load_tile(k1_ptr + head * D, cols, d, N, D)
    k2 = load_tile(k2_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * E, cols, width, N, E)
    dk1 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dk2 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    for start in range(first, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        do = load_tile(do_ptr + head * E, rows, width, N, E)
        lse1 = tl.load(lse1_ptr + head + rows, mask=rows < N, other=float("inf"))
        lse2 = tl.load(lse2_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        e = tl.load(e_ptr + head + rows, mask=rows < N, other=0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        q1 = load_tile(q1_ptr + head * D, rows, d, N, D)
        p1 = tl.exp2(causal_scores(q1, k1, rows, cols, scale_log2, PRECISION) - lse1[:, None])
        ds1 = p1 * (dp - delta[:, None])
        dk1 = tl.dot(tl.trans(ds1.to(q1.dtype)), q1, dk1, input_precision=PRECISION)
        q2 = load_tile(q2_ptr + head * D, rows, d, N, D)
        p2 = tl.exp2(causal_scores(q2, k2, rows, cols, scale_log2, PRECISION) - lse2[:, None])
        ds2 = p2 * (dp - e[:, None])
        dk2 = tl.dot(tl.trans(ds2.to(q2.dtype)), q2, dk2, input_precision=PRECISION)
        dv = tl.dot(tl.trans((p1 - c * p2).to(do.dtype)), do, dv, input_precision=PRECISION)
    store_tile(dk1_ptr + head * D, dk1 * scale, cols, d, N, D)
    store_tile(dk2_ptr + head * D, dk2 * (-c * scale), cols, d, N, D)
    store_tile(dv_ptr + head * E, dv, cols, width, N, E)


class DifferentialAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q1, k1, q2, k2, v, c):
        inputs = tuple(tensor.contiguous() for tensor in (q1, k1, q2, k2, v, c))
        o, *saved = differential_forward(*inputs)
        ctx.save_for_backward(*inputs, *saved)
        return o

    @staticmethod
    def backward(ctx, do):
        q1, k1, q2, k2, v, c, o1, o2, lse1, lse2 = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), E, tiles = q1.shape, v.shape[-1], tiling(q1, v)
        T = triton.cdiv(N, tiles["BLOCK"])
        delta, e, slots = torch.empty_like(lse1), torch.empty_like(lse1), lse1.new_empty((B, H, T))
        corrections_kernel[(T, B * H)](
            o1, o2, do, delta, e, slots, N, E, BLOCK=tiles["BLOCK"], BLOCK_E=tiles["BLOCK_E"]
        )
        seen = (q1, k1, q2, k2, v, c, do, lse1, lse2, delta, e)
        sizes = (H, N, D, E, D**-0.5, D**-0.5 * LOG2E)
        grads = [torch.empty_like(tensor) for tensor in (q1, k1, q2, k2, v, c)]
        dq1, dk1, dq2, dk2, dv, dc = grads
        if needs[0] or needs[2]:
            query_kernel[(T, B * H)](*seen, dq1, dq2, *sizes, **tiles)
        if needs[1] or needs[3] or needs[4]:
            key_kernel[(T, B * H)](*seen, dk1, dk2, dv, *sizes, **tiles)
        if needs[5]:
            dc_kernel[(H,)](slots, dc, B, H, T, BLOCK=64)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def differential_attention_autograd(q1, k1, q2, k2, v, c):
    return DifferentialAttention.apply(q1, k1, q2, k2, v, c)
