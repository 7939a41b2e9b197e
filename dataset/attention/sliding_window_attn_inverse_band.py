"""Sliding-window attention: query i sees the keys j with i - W < j <= i.

Forward    P_ij = softmax over the band of s q_i.k_j,  O = P V
Backward   dV = P^T dO,  dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dQ = s dS K,  dK = s dS^T Q,
           all restricted to the band; seen from key j the band is j <= i < j + W

Forward schedule: a query tile's owner walks only the key tiles that meet the band; lse is saved.
Backward schedule: loop bounds are mirrored with the ownership. The owner of keys [a, b) walks queries [a, b
- 1 + W), the owner of queries [a, b) walks keys [a - W + 1, b); tiles on both edges are masked on both
sides. Work and traffic stay O(N W) in every kernel, P is rebuilt from lse, and nothing is atomic.

op: window_attention
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
    BLOCK_M = 64 if q.dtype != torch.float32 else 32 if BLOCK_D <= 64 else 16
    BLOCK_N = max(16, BLOCK_M // 2)
    return {
        "PRECISION": PRECISION,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "num_warps": 8,
    }


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def in_band(rows, cols, N, W):
    near = (cols[None, :] <= rows[:, None]) & (cols[None, :] > rows[:, None] - W)
    return near & (rows[:, None] < N)


@triton.jit
def window_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, W, scale_log2,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK_M], -1e30, dtype=tl.float32)  # finite: a row may meet its band only in a later tile
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = tl.maximum(first - W + 1, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(first + BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(in_band(rows, cols, N, W), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(rows < N, total, 1.0)
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def window_attention_forward(q, k, v, window):
    if window < 1:
        raise ValueError("a window has at least one key")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    grid = (triton.cdiv(N, tiles["BLOCK_M"]), B * H)
    window_attention_kernel[grid](q, k, v, o, lse, N, D, window, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def window_attention(q, k, v, window):
    return window_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), window)[0]


def reference(q, k, v, window):
    N, D = q.shape[-2:]
    i = torch.arange(N, device=q.device)
    band = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - window)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(~band, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 1, "H": 8, "N": 8192, "W": 1024, "D": 128},
    {"B": 2, "H": 16, "N": 4096, "W": 512, "D": 64},
    {"B": 1, "H": 10, "N": 5003, "W": 257, "D": 96},
]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 90, "W": 24, "D": 16}, {"B": 1, "H": 1, "N": 50, "W": 5, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3)), {"window": dims["W"]}


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, N, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + head * D, rows, d, N, D).to(tl.float32)
    do = load_tile(do_ptr + head * D, rows, d, N, D).to(tl.float32)
    tl.store(delta_ptr + head + rows, tl.sum(o * do, axis=1), mask=rows < N)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, W, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.where(in_band(rows, cols, N, W), tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, W, scale, scale_log2,
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
    for start in range(first // BLOCK_M * BLOCK_M, tl.minimum(first + BLOCK_N - 1 + W, N), BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, W, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, W, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = tl.maximum(first - W + 1, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(first + BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, W, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, window):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = window_attention_forward(q, k, v, window)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.window = window
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        W, scale, scale_log2 = ctx.window, D**-0.5, D**-0.5 * LOG2E
        tiles = tiling(q)
        BLOCK_M, BLOCK_N, BLOCK_D = tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["BLOCK_D"]
        q_grid, k_grid = (triton.cdiv(N, BLOCK_M), B * H), (triton.cdiv(N, BLOCK_N), B * H)
        delta = torch.empty_like(lse)
        delta_kernel[q_grid](o, do, delta, N, D, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D)
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            dq_kernel[q_grid](q, k, v, do, lse, delta, dq, N, D, W, scale, scale_log2, **tiles)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[k_grid](q, k, v, do, lse, delta, dk, dv, N, D, W, scale, scale_log2, **tiles)
        return dq, dk if ctx.needs_input_grad[1] else None, dv if ctx.needs_input_grad[2] else None, None


def window_attention_autograd(q, k, v, window):
    return WindowAttention.apply(q, k, v, window)
