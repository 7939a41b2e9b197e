"""Joint attention of two streams, as of text and image in a diffusion transformer: all see all.

Forward    Q = [Q1; Q2], K = [K1; K2], V = [V1; V2] over tokens:  P = softmax(s Q K^T),  [O1; O2] = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,   for either stream a, b in {1, 2}:
           dQ_a = s sum_b dS_ab K_b,   dK_b = s sum_a dS_ab^T Q_a,   dV_b = sum_a P_ab^T dO_a

Forward schedule: the streams have projections of their own, so six tensors come in and two go out; the joined
ones, three copies in front and one behind, are not made. A kernel has one stream as queries and is launched
for each; its programs own a query tile and walk the keys of the first stream, then of the second, with one
online softmax. lse is saved for each stream, in units of log2.
Backward schedule: the same, in both ownerships. A launch makes dQ of one stream, walking both streams' keys;
another makes dK and dV of one stream, walking both streams' queries, whose lse and delta speak for the joined
row. Tiles never mix streams, so any two lengths work, gradients are separate tensors from the start, and a
stream whose gradients nobody wants, a frozen text encoder's, costs no launch of its own.

op: joint_attention
schedule: swap_owner, recompute_from_stats
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
def attend(
    q, k_ptr, v_ptr, m, total, acc, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax, taken over the keys of one stream."""
    d = tl.arange(0, BLOCK_D)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, N, D)
        v = load_tile(v_ptr, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@triton.jit
def joint_kernel(
    q_ptr, k1_ptr, v1_ptr, k2_ptr, v2_ptr, o_ptr, lse_ptr, M, N1, N2, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    m, total, acc = attend(
        q, k1_ptr + head * N1 * D, v1_ptr + head * N1 * D, m, total, acc, N1, D, scale_log2,
        PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    m, total, acc = attend(
        q, k2_ptr + head * N2 * D, v2_ptr + head * N2 * D, m, total, acc, N2, D, scale_log2,
        PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_tile(o_ptr + head * M * D, acc / total[:, None], rows, d, M, D)
    tl.store(lse_ptr + head * M + rows, m + tl.log2(total), mask=rows < M)


def joint_forward(q1, k1, v1, q2, k2, v2):
    B, H, _, D = q1.shape
    if not q1.shape == k1.shape == v1.shape or not q2.shape == k2.shape == v2.shape:
        raise ValueError("q, k and v of a stream must have one shape")
    if q2.shape != (B, H, q2.shape[2], D):
        raise ValueError("the streams must have the same batch, heads and dimension")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    outputs, stats, tiles = [], [], tiling(q1)
    for q in (q1, q2):
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        grid, sizes = (triton.cdiv(q.shape[2], tiles["BLOCK"]), B * H), (q.shape[2], q1.shape[2], q2.shape[2])
        joint_kernel[grid](q, k1, v1, k2, v2, o, lse, *sizes, D, D**-0.5 * LOG2E, **tiles)
        outputs.append(o)
        stats.append(lse)
    return *outputs, *stats


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def joint_attention(q1, k1, v1, q2, k2, v2):
    """q1, k1, v1: (batch, heads, N1, dim); q2, k2, v2: (batch, heads, N2, dim); gives o1 and o2."""
    return joint_forward(*(tensor.contiguous() for tensor in (q1, k1, v1, q2, k2, v2)))[:2]


def reference(q1, k1, v1, q2, k2, v2):
    q, k, v = (torch.cat(pair, dim=2) for pair in ((q1, q2), (k1, k2), (v1, v2)))
    o = torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v
    return o[:, :, : q1.shape[2]], o[:, :, q1.shape[2] :]


SWEEP = [
    {"B": 1, "H": 24, "N1": 512, "N2": 2048, "D": 64},
    {"B": 2, "H": 8, "N1": 77, "N2": 1031, "D": 128},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "N1": 7, "N2": 34, "D": 16},
    {"B": 2, "H": 1, "N1": 33, "N2": 9, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, D = dims["B"], dims["H"], dims["D"]
    lengths = [dims["N1"]] * 3 + [dims["N2"]] * 3
    return tuple(torch.randn(B, H, N, D, device=device, dtype=dtype) for N in lengths)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def walk_keys(
    q, k_ptr, v_ptr, do, lse, delta, dq, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, N, D)
        v = load_tile(v_ptr, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def walk_queries(
    q_ptr, k, v, do_ptr, lse_ptr, delta_ptr, dk, dv, cols, M, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr, rows, d, M, D)
        do = load_tile(do_ptr, rows, d, M, D)
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < M, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def query_kernel(
    q_ptr, do_ptr, lse_ptr, delta_ptr, k1_ptr, v1_ptr, k2_ptr, v2_ptr, dq_ptr,
    M, N1, N2, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ of one stream, from the keys of both."""
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
    delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dq = walk_keys(
        q, k1_ptr + head * N1 * D, v1_ptr + head * N1 * D, do, lse, delta, dq, N1, D, scale_log2,
        PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    dq = walk_keys(
        q, k2_ptr + head * N2 * D, v2_ptr + head * N2 * D, do, lse, delta, dq, N2, D, scale_log2,
        PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_tile(dq_ptr + head * M * D, dq * scale, rows, d, M, D)


@triton.jit
def key_kernel(
    k_ptr, v_ptr, q1_ptr, do1_ptr, lse1_ptr, delta1_ptr, q2_ptr, do2_ptr, lse2_ptr, delta2_ptr,
    dk_ptr, dv_ptr, N, N1, N2, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of one stream, from the queries of both."""
    head = tl.program_id(1).to(tl.int64)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * N * D, cols, d, N, D)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    at1, at2 = head * N1, head * N2
    dk, dv = walk_queries(
        q1_ptr + at1 * D, k, v, do1_ptr + at1 * D, lse1_ptr + at1, delta1_ptr + at1, dk, dv, cols,
        N1, N, D, scale_log2, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    dk, dv = walk_queries(
        q2_ptr + at2 * D, k, v, do2_ptr + at2 * D, lse2_ptr + at2, delta2_ptr + at2, dk, dv, cols,
        N2, N, D, scale_log2, PRECISION, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_tile(dk_ptr + head * N * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * N * D, dv, cols, d, N, D)


class JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q1, k1, v1, q2, k2, v2):
        inputs = tuple(tensor.contiguous() for tensor in (q1, k1, v1, q2, k2, v2))
        o1, o2, lse1, lse2 = joint_forward(*inputs)
        ctx.save_for_backward(*inputs, o1, o2, lse1, lse2)
        return o1, o2

    @staticmethod
    def backward(ctx, do1, do2):
        q1, k1, v1, q2, k2, v2, o1, o2, lse1, lse2 = ctx.saved_tensors
        needs, (B, H, N1, D), N2, tiles = ctx.needs_input_grad, q1.shape, q2.shape[2], tiling(q1)
        BLOCK, rest = tiles["BLOCK"], (N1, N2, D, D**-0.5, D**-0.5 * LOG2E)
        queries = []
        for q, o, do, lse in ((q1, o1, do1.contiguous(), lse1), (q2, o2, do2.contiguous(), lse2)):
            delta, R = torch.empty_like(lse), lse.numel()
            delta_kernel[(triton.cdiv(R, 32),)](o, do, delta, R, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"])
            queries.append((q, do, lse, delta))
        grads = [torch.empty_like(tensor) for tensor in (q1, k1, v1, q2, k2, v2)]
        for at, N, k, v in ((0, N1, k1, v1), (1, N2, k2, v2)):
            grid, (dq, dk, dv) = (triton.cdiv(N, BLOCK), B * H), grads[3 * at : 3 * at + 3]
            if needs[3 * at]:
                query_kernel[grid](*queries[at], k1, v1, k2, v2, dq, N, *rest, **tiles)
            if needs[3 * at + 1] or needs[3 * at + 2]:
                key_kernel[grid](k, v, *queries[0], *queries[1], dk, dv, N, *rest, **tiles)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def joint_attention_autograd(q1, k1, v1, q2, k2, v2):
    return JointAttention.apply(q1, k1, v1, q2, k2, v2)
