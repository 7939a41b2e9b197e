"""Causal attention whose output passes a sigmoid gate, elementwise: one output is stored, the gated one.

Forward    P = softmax(s Q K^T) over j <= i,   O = P V,   Y = O * sigmoid(G)
Backward   with r = sigmoid(G):   dO = dY * r,   dG = dY * O * r (1 - r),
           dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i> = <dY_i, Y_i>,
           dQ = s dS K,   dK = s dS^T Q,   dV = P^T dO

Forward schedule: flash attention with the gate in its epilogue; lse is saved, in units of log2. O never
reaches memory: with the gate as a layer of its own it would be stored, read and kept.
Backward schedule: delta needs Y, not O, since the gate moves from one factor to the other. dG needs O, and Y
over the gate is not O where a gate is shut. But the owner of a query tile walks all its keys for dQ anyway,
with P at hand: one more dot a tile, P V, gives O again, and unrounded. It also stores dO for the owners of
keys, which are those of flash attention. So a dot a tile is paid for T D numbers a head that are neither
written nor kept between the passes.

op: gated_attention
schedule: swap_owner, row_reduce_correct, recompute_from_stats
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
    """Tiles and the precision of dots; products of whole float32 numbers want small tiles."""
    single, BLOCK_D = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[3]))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": (32 if BLOCK_D <= 64 else 16) if single else 64,
        "BLOCK_D": BLOCK_D,
        "num_warps": 4 if single else 8,
        "num_stages": 1,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_attention_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, y_ptr, lse_ptr, T, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, T, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, T, D)
        v = load_tile(v_ptr + head * D, cols, d, T, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p, rescale = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    gate = tl.sigmoid(load_tile(g_ptr + head * D, rows, d, T, D).to(tl.float32))
    store_tile(y_ptr + head * D, acc / total[:, None] * gate, rows, d, T, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < T)


def gated_attention_forward(q, k, v, g):
    B, H, T, D = q.shape
    if not q.shape == k.shape == v.shape == g.shape:
        raise ValueError("q, k, v and g must have one shape")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    y, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    gated_attention_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H)](
        q, k, v, g, y, lse, T, D, D**-0.5 * LOG2E, **tiles
    )
    return y, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gated_attention(q, k, v, g):
    """q, k, v, g: (B, H, T, D), g the gates before the sigmoid."""
    return gated_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())[0]


def reference(q, k, v, g):
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)
    future = torch.ones(s.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(future, -float("inf")), dim=-1) @ v * torch.sigmoid(g)


SWEEP = [{"B": 2, "H": 16, "T": 2048, "D": 128}, {"B": 1, "H": 5, "T": 1021, "D": 80}]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 41, "D": 16}, {"B": 2, "H": 1, "T": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["T"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(4))


# ---- backward ----


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    seen = (rows[:, None] < T) & (cols[None, :] <= rows[:, None])
    p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
    return p, p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, y_ptr, dy_ptr, lse_ptr, delta_ptr, do_ptr, dq_ptr, dg_ptr, T, D, scale,
    scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ and dG; stores delta and dO for the owners of keys."""
    head = tl.program_id(1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, T, D)
    dy = load_tile(dy_ptr + head * D, rows, d, T, D).to(tl.float32)
    gate = tl.sigmoid(load_tile(g_ptr + head * D, rows, d, T, D).to(tl.float32))
    delta = tl.sum(dy * load_tile(y_ptr + head * D, rows, d, T, D).to(tl.float32), axis=1)
    do = (dy * gate).to(q.dtype)
    store_tile(do_ptr + head * D, do, rows, d, T, D)
    tl.store(delta_ptr + head + rows, delta, mask=rows < T)
    lse = tl.load(lse_ptr + head + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    o = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, T, D)
        v = load_tile(v_ptr + head * D, cols, d, T, D)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION)
        o = tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, T, D)
    store_tile(dg_ptr + head * D, dy * o * gate * (1 - gate), rows, d, T, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, T, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, T, D)
    v = load_tile(v_ptr + head * D, cols, d, T, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, T, D)
        do = load_tile(do_ptr + head * D, rows, d, T, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < T, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < T, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, T, D)
    store_tile(dv_ptr + head * D, dv, cols, d, T, D)


class GatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g):
        q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
        y, lse = gated_attention_forward(q, k, v, g)
        ctx.save_for_backward(q, k, v, g, y, lse)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, g, y, lse = ctx.saved_tensors
        B, H, T, D = q.shape
        tiles, needs, scales = tiling(q), ctx.needs_input_grad, (D**-0.5, D**-0.5 * LOG2E)
        grid = (triton.cdiv(T, tiles["BLOCK"]), B * H)
        dq, dk, dv, dg, do = (torch.empty_like(x) for x in (q, k, v, g, q))
        delta = torch.empty_like(lse)
        query_kernel[grid](q, k, v, g, y, dy.contiguous(), lse, delta, do, dq, dg, T, D, *scales, **tiles)
        if needs[1] or needs[2]:
            key_kernel[grid](q, k, v, do, lse, delta, dk, dv, T, D, *scales, **tiles)
        grads = zip((dq, dk, dv, dg), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def gated_attention_autograd(q, k, v, g):
    return GatedAttention.apply(q, k, v, g)
