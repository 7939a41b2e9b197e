"""Causal attention whose logits fall linearly with distance, at a slope that each head learns.

Forward    S_ij = s <q_i, k_j> - m_h (i - j) for j <= i,  P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           dm_h = - sum over batch, i, j of dS_ij (i - j)

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal. The bias comes from
the indices, in registers: no N x N tensor exists. lse is saved, in units of log2.
Backward schedule: dm_h is a sum of all dS of a head, weighted by distance. Whoever rebuilds dS may take it
along: one multiplication and one addition an element, no dot. The query tile's owner does, for it walks the
keys anyway; it keeps the sum of its rows in registers and stores one number in a slot of (batch, head, tile).
A last kernel, a program a head, adds the slots of its head over batch and tiles. Atomics on H numbers would
make every program of a head wait for one address. The distances are taken as they are, small near the
diagonal, where P has its mass: sum_j dS_ij is 0, so -sum dS_ij (i - j) equals sum dS_ij j, but that is a
difference of large numbers.

op: alibi_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
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


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores(q, k, rows, cols, slope, scale, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2, -inf for keys that come after the query."""
    distance = rows[:, None] - cols[None, :]
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - slope * distance) * LOG2E
    return tl.where(distance >= 0, s, -float("inf"))


@triton.jit
def alibi_kernel(
    q_ptr, k_ptr, v_ptr, slope_ptr, o_ptr, lse_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    slope = tl.load(slope_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = scores(q, k, rows, cols, slope, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def alibi_forward(q, k, v, slope):
    if not q.shape == k.shape == v.shape or slope.shape != q.shape[1:2]:
        raise ValueError("q, k and v must have one shape, and slope a number a head")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    alibi_kernel[grid](q, k, v, slope, o, lse, H, N, D, D**-0.5, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def alibi_attention(q, k, v, slope):
    """q, k, v: (batch, heads, tokens, dim); slope: (heads)."""
    return alibi_forward(q.contiguous(), k.contiguous(), v.contiguous(), slope.contiguous())[0]


def reference(q, k, v, slope):
    i = torch.arange(q.shape[2], device=q.device)
    distance = i[:, None] - i
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) - slope[:, None, None] * distance
    return torch.softmax(s.masked_fill(distance < 0, -float("inf")), dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 2, "H": 3, "N": 44, "D": 16}, {"B": 1, "H": 2, "N": 70, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    slope = torch.exp2(-8.0 / max(1, H) * torch.arange(1, H + 1, device=device)).to(dtype)
    return q, k, v, slope


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, slope, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, rows, cols, slope, scale, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, slope_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, slots_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    slope = tl.load(slope_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    fall = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, slope, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        fall += tl.sum(ds * (rows[:, None] - cols[None, :]), axis=1)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)
    tl.store(slots_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), -tl.sum(fall))


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, slope_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    slope = tl.load(slope_ptr + tl.program_id(1) % H).to(tl.float32)
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, slope, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def slope_kernel(slots_ptr, dslope_ptr, B, H, T, BLOCK: tl.constexpr):
    """Sum of slots (B, H, T) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(slots_ptr + (i // T * H + h) * T + i % T, mask=i < B * T, other=0.0)
    tl.store(dslope_ptr + h, tl.sum(acc).to(dslope_ptr.dtype.element_ty))


class AlibiAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slope):
        q, k, v, slope = q.contiguous(), k.contiguous(), v.contiguous(), slope.contiguous()
        o, lse = alibi_forward(q, k, v, slope)
        ctx.save_for_backward(q, k, v, slope, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, slope, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        T = triton.cdiv(N, tiles["BLOCK"])
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        dq = dk = dv = dslope = None
        if needs[0] or needs[3]:
            dq, slots = torch.empty_like(q), lse.new_empty((B, H, T))
            query_kernel[(T, B * H)](q, k, v, slope, do, lse, delta, dq, slots, H, N, D, D**-0.5, **tiles)
            if needs[3]:
                dslope = torch.empty_like(slope)
                slope_kernel[(H,)](slots, dslope, B, H, T, BLOCK=64)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(T, B * H)](q, k, v, slope, do, lse, delta, dk, dv, H, N, D, D**-0.5, **tiles)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dslope


def alibi_attention_autograd(q, k, v, slope):
    return AlibiAttention.apply(q, k, v, slope)
