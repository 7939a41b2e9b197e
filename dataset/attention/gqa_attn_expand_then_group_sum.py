"""Grouped-query attention with few key heads: each query head has its own dK and dV, added after.

Forward    query head h looks at key head h // G:  P = softmax(s Q_h K^T),  O_h = P V
Backward   dS_h = P_h * (dO_h V^T - delta_h),  dQ_h = s dS_h K,  dK_h = s dS_h^T Q_h,  dV_h = P_h^T dO_h,
           dK = sum of dK_h, dV = sum of dV_h over the G heads of the group

Forward schedule: a program owns (query tile, query head) and walks the keys of its group with an online
softmax. lse is saved, in units of log2.
Backward schedule: the sum over a group can be in the key owner's loop, with a program for each key tile and
key head. With one or two key heads, a small batch and a sequence of a few thousand, that is a few dozen
programs, each with G times the work, on a GPU with more multiprocessors than that. Here a program owns a key
tile of one query head: G times the programs, each with the work of plain attention. It stores dK_h and dV_h
in fp32, and a second kernel, elementwise, adds each group in a fixed order and rounds once. The price is
memory: G buffers as large as K and as V, written once and read once.

op: gqa_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
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
def gqa_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, G, M, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    q_head = tl.program_id(1).to(tl.int64) * M
    kv_head = (tl.program_id(1) // G).to(tl.int64) * N  # (b HQ + h) // G = b HK + h // G
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + q_head * D, rows, d, M, D)
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
    store_tile(o_ptr + q_head * D, acc / total[:, None], rows, d, M, D)
    tl.store(lse_ptr + q_head + rows, m + tl.log2(total), mask=rows < M)


def gqa_forward(q, k, v):
    (B, HQ, M, D), (_, HK, N, _) = q.shape, k.shape
    if k.shape != (B, HK, N, D) or v.shape != k.shape or N == 0 or HK == 0 or HQ % HK:
        raise ValueError("k and v do not fit q, there are no keys, or their heads do not divide those of q")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, HQ, M), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), B * HQ)
    gqa_kernel[grid](q, k, v, o, lse, HQ // HK, M, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def gqa_attention(q, k, v):
    """q: (batch, query heads, M, dim); k, v: (batch, key heads, N, dim), N at least 1."""
    return gqa_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    G = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, dim=1), v.repeat_interleave(G, dim=1)
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v


SWEEP = [
    {"B": 1, "HQ": 32, "HK": 2, "M": 2048, "N": 2048, "D": 64},
    {"B": 2, "HQ": 12, "HK": 1, "M": 1000, "N": 777, "D": 128},
]
SWEEP_CPU = [
    {"B": 2, "HQ": 4, "HK": 1, "M": 20, "N": 34, "D": 16},
    {"B": 1, "HQ": 4, "HK": 2, "M": 33, "N": 9, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, HQ, HK, M, N, D = (dims[key] for key in ("B", "HQ", "HK", "M", "N", "D"))
    q = torch.randn(B, HQ, M, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, HK, N, D, device=device, dtype=dtype) for _ in range(2))


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
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, G, M, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    q_head = tl.program_id(1).to(tl.int64) * M
    kv_head = (tl.program_id(1) // G).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + q_head * D, rows, d, M, D)
    do = load_tile(do_ptr + q_head * D, rows, d, M, D)
    lse = tl.load(lse_ptr + q_head + rows, mask=rows < M, other=float("inf"))
    delta = tl.load(delta_ptr + q_head + rows, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + kv_head * D, cols, d, N, D)
        v = load_tile(v_ptr + kv_head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + q_head * D, dq * scale, rows, d, M, D)


@triton.jit
def head_key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, G, M, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK_h and dV_h of one key tile and one query head."""
    q_head = tl.program_id(1).to(tl.int64) * M
    kv_head = (tl.program_id(1) // G).to(tl.int64) * N
    own = tl.program_id(1).to(tl.int64) * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + kv_head * D, cols, d, N, D)
    v = load_tile(v_ptr + kv_head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + q_head * D, rows, d, M, D)
        do = load_tile(do_ptr + q_head * D, rows, d, M, D)
        lse = tl.load(lse_ptr + q_head + rows, mask=rows < M, other=float("inf"))
        delta = tl.load(delta_ptr + q_head + rows, mask=rows < M, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + own * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + own * D, dv, cols, d, N, D)


@triton.jit
def group_sum_kernel(parts_ptr, total_ptr, G, size, BLOCK: tl.constexpr):
    """Sum of the G parts of a key head, each of size numbers."""
    kv_head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for g in range(G):
        acc += tl.load(parts_ptr + (kv_head * G + g) * size + at, mask=at < size, other=0.0)
    tl.store(total_ptr + kv_head * size + at, acc.to(total_ptr.dtype.element_ty), mask=at < size)


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
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, HQ, M, D), (_, HK, N, _), tiles = q.shape, k.shape, tiling(q)
        G, BLOCK, R = HQ // HK, tiles["BLOCK"], B * HQ * M
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(R, 32),)](o, do, delta, R, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"])
        seen, sizes = (q, k, v, do, lse, delta), (G, M, N, D, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(triton.cdiv(M, BLOCK), B * HQ)](*seen, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            parts = lse.new_empty((2, B, HQ, N, D))
            head_key_kernel[(triton.cdiv(N, BLOCK), B * HQ)](*seen, parts[0], parts[1], *sizes, **tiles)
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            for part, total, needed in ((parts[0], dk, needs[1]), (parts[1], dv, needs[2])):
                if needed:
                    grid = (triton.cdiv(N * D, 512), B * HK)
                    group_sum_kernel[grid](part, total, G, N * D, BLOCK=512)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def gqa_attention_autograd(q, k, v):
    return GQAAttention.apply(q, k, v)
