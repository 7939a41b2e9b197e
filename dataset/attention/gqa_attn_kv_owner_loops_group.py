"""Grouped-query attention: G query heads share one key and value head.

Forward    for query head h with kv head h // G:  P = softmax(s Q_h K^T),  O_h = P V
Backward   dS_h = P_h * (dO_h V^T - delta_h),  dQ_h = s dS_h K,
           dV = sum_h P_h^T dO_h,  dK = s sum_h dS_h^T Q_h over the G heads of the group

Forward schedule: a program owns (query tile, query head) and walks the keys with an online softmax; lse is
saved.
Backward schedule: the head sum is made part of the key owner's loop. A key tile's owner, one per kv head,
walks the G query heads and all query tiles with dK and dV in registers: no expanded [HQ] gradients, no
atomics, K and V are loaded once for the whole group. dQ keeps the forward's ownership.

op: gqa_attention
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
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    BLOCK = 64 if q.dtype != torch.float32 else 32 if BLOCK_D <= 64 else 16
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def gqa_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, G, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    kv_head = (tl.program_id(1) // G).to(tl.int64) * N  # HQ = HK G, so (b HQ + h) // G = b HK + h // G
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + kv_head * D, cols, d, N, D)
        v = load_tile(v_ptr + kv_head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def gqa_forward(q, k, v):
    B, HQ, N, D = q.shape
    if HQ % k.shape[1] != 0:
        raise ValueError(f"{HQ} query heads cannot share {k.shape[1]} key heads")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, HQ, N), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * HQ)
    gqa_kernel[grid](q, k, v, o, lse, HQ // k.shape[1], N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def gqa_attention(q, k, v):
    """q: (batch, query heads, tokens, dim); k, v: (batch, kv heads, tokens, dim)."""
    return gqa_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    G = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, dim=1), v.repeat_interleave(G, dim=1)
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v


SWEEP = [
    {"B": 1, "HQ": 32, "HK": 8, "N": 4096, "D": 128},
    {"B": 2, "HQ": 28, "HK": 4, "N": 2048, "D": 128},
    {"B": 4, "HQ": 14, "HK": 2, "N": 2003, "D": 64},
]
SWEEP_CPU = [{"B": 1, "HQ": 6, "HK": 2, "N": 45, "D": 16}, {"B": 2, "HQ": 2, "HK": 2, "N": 33, "D": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, HQ, HK, N, D = (dims[key] for key in ("B", "HQ", "HK", "N", "D"))
    q = torch.randn(B, HQ, N, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, HK, N, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, v


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + head * D, rows, d, N, D).to(tl.float32)
    do = load_tile(do_ptr + head * D, rows, d, N, D).to(tl.float32)
    tl.store(delta_ptr + head + rows, tl.sum(o * do, axis=1), mask=rows < N)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.where((rows[:, None] < N) & (cols[None, :] < N), tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, G, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + kv_head * D, cols, d, N, D)
    v = load_tile(v_ptr + kv_head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for g in range(G):
        head = kv_head * G + g * N
        for start in range(0, N, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            q = load_tile(q_ptr + head * D, rows, d, N, D)
            do = load_tile(do_ptr + head * D, rows, d, N, D)
            lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
            delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
            p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + kv_head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + kv_head * D, dv, cols, d, N, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, G, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    kv_head = (tl.program_id(1) // G).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + kv_head * D, cols, d, N, D)
        v = load_tile(v_ptr + kv_head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class GQAAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = gqa_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, HQ, N, D = q.shape
        HK = k.shape[1]
        G, scale, scale_log2 = HQ // HK, D**-0.5, D**-0.5 * LOG2E
        tiles = tiling(q)
        BLOCK, BLOCK_D = tiles["BLOCK"], tiles["BLOCK_D"]
        q_grid, k_grid = (triton.cdiv(N, BLOCK), B * HQ), (triton.cdiv(N, BLOCK), B * HK)
        delta = torch.empty_like(lse)
        delta_kernel[q_grid](o, do, delta, N, D, BLOCK=BLOCK, BLOCK_D=BLOCK_D)
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            dq_kernel[q_grid](q, k, v, do, lse, delta, dq, G, N, D, scale, scale_log2, **tiles)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[k_grid](q, k, v, do, lse, delta, dk, dv, G, N, D, scale, scale_log2, **tiles)
        return dq, dk if ctx.needs_input_grad[1] else None, dv if ctx.needs_input_grad[2] else None


def gqa_attention_autograd(q, k, v):
    return GQAAttention.apply(q, k, v)
