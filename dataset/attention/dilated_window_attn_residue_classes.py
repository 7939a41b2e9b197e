"""Dilated sliding-window attention: query i sees every d-th token before it, R of them.

Forward    P_ij = softmax of s <q_i, k_j> over j = i, i - d, .., i - (R - 1) d with j >= 0,  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dQ = s dS K,  dK = s dS^T Q,  dV = P^T dO,
           all restricted to the band

Forward schedule: i and j have the same remainder modulo d, so the problem is d problems that never meet. In
class c, token c + d t has number t, and what t sees is t, t - 1, .., t - R + 1: a dense band. A program owns
(class, tile of t) and walks the tiles of its class that meet the band; a tile is a load with stride d. Over
the tokens as they lie, a tile of keys would be masked but for every d-th element. lse is saved, in log2.
Backward schedule: the same classes, so dense bands again, with the bounds mirrored: a key tile's owner walks
numbers u with t <= u < t + R for dK and dV, a query tile's owner the band below it for dQ. Each token is in
one class: all stores are unique, strided as the loads are. Of the grid, class c has one tile less where N is
not a multiple of d; such a program's loop is empty and its stores are masked.

op: dilated_window_attention
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
    """Tiles and the precision of dots: a window is a few hundred keys, so tiles are small."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, t, e, T, D, stride):
    """Numbers t of a class, whose first token ptr points at."""
    mask = (t[:, None] < T) & (e[None, :] < D)
    return tl.load(ptr + t[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, t, e, T, D, stride):
    mask = (t[:, None] < T) & (e[None, :] < D)
    tl.store(ptr + t[:, None] * stride + e[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def in_band(t, u, T, R):
    """Query t sees key u."""
    return (u[None, :] <= t[:, None]) & (u[None, :] > t[:, None] - R) & (t[:, None] < T)


@triton.jit
def dilated_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, R, d, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1)
    at = tl.program_id(2).to(tl.int64) * N + c  # first token of the class
    T = (N - c + d - 1) // d
    first = tl.program_id(0) * BLOCK
    t, e = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + at * D, t, e, T, D, d * D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a row may meet its band only in a later tile
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    begin = tl.maximum(first - R + 1, 0) // BLOCK * BLOCK
    for start in range(begin, tl.minimum(first + BLOCK, T), BLOCK):
        u = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + at * D, u, e, T, D, d * D)
        v = load_tile(v_ptr + at * D, u, e, T, D, d * D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(in_band(t, u, T, R), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(t < T, total, 1.0)
    store_tile(o_ptr + at * D, acc / total[:, None], t, e, T, D, d * D)
    tl.store(lse_ptr + at + t * d, m + tl.log2(total), mask=t < T)


def grid_of(q, d, BLOCK):
    return triton.cdiv(triton.cdiv(q.shape[2], d), BLOCK), d, q.shape[0] * q.shape[1]


def dilated_forward(q, k, v, R, d):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    if D > 128 or R < 1 or d < 1:
        raise ValueError(f"a head of {D} does not fit one tile, or {R} keys in steps of {d} are no window")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = grid_of(q, d, tiles["BLOCK"])
    dilated_kernel[grid](q, k, v, o, lse, N, D, R, d, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def dilated_window_attention(q, k, v, R, d):
    """q, k, v: (batch, heads, tokens, dim); a window is R keys in steps of d tokens."""
    return dilated_forward(q.contiguous(), k.contiguous(), v.contiguous(), R, d)[0]


def reference(q, k, v, R, d):
    N, D = q.shape[-2:]
    i = torch.arange(N, device=q.device)
    gap = i[:, None] - i
    seen = (gap >= 0) & (gap % d == 0) & (gap < R * d)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 2, "H": 12, "N": 4096, "R": 128, "d": 4, "D": 64},
    {"B": 1, "H": 8, "N": 5003, "R": 100, "d": 3, "D": 128},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "N": 61, "R": 8, "d": 3, "D": 16},
    {"B": 2, "H": 1, "N": 75, "R": 34, "d": 2, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    qkv = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return qkv, {"R": dims["R"], "d": dims["d"]}


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, rows, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, row, e, rows, D, D).to(tl.float32)
    do = load_tile(do_ptr, row, e, rows, D, D).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=1), mask=row < rows)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, t, u, T, R, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(in_band(t, u, T, R), s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, R, d, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1)
    at = tl.program_id(2).to(tl.int64) * N + c
    T = (N - c + d - 1) // d
    first = tl.program_id(0) * BLOCK
    t, e = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + at * D, t, e, T, D, d * D)
    do = load_tile(do_ptr + at * D, t, e, T, D, d * D)
    lse = tl.load(lse_ptr + at + t * d, mask=t < T, other=0.0)
    delta = tl.load(delta_ptr + at + t * d, mask=t < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    begin = tl.maximum(first - R + 1, 0) // BLOCK * BLOCK
    for start in range(begin, tl.minimum(first + BLOCK, T), BLOCK):
        u = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + at * D, u, e, T, D, d * D)
        v = load_tile(v_ptr + at * D, u, e, T, D, d * D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, t, u, T, R, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + at * D, dq * scale, t, e, T, D, d * D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, R, d, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1)
    at = tl.program_id(2).to(tl.int64) * N + c
    T = (N - c + d - 1) // d
    first = tl.program_id(0) * BLOCK
    u, e = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + at * D, u, e, T, D, d * D)
    v = load_tile(v_ptr + at * D, u, e, T, D, d * D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first, tl.minimum(first + BLOCK - 1 + R, T), BLOCK):
        t = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + at * D, t, e, T, D, d * D)
        do = load_tile(do_ptr + at * D, t, e, T, D, d * D)
        lse = tl.load(lse_ptr + at + t * d, mask=t < T, other=0.0)
        delta = tl.load(delta_ptr + at + t * d, mask=t < T, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, t, u, T, R, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + at * D, dk * scale, u, e, T, D, d * D)
    store_tile(dv_ptr + at * D, dv, u, e, T, D, d * D)


class DilatedWindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, R, d):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = dilated_forward(q, k, v, R, d)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.R, ctx.d = R, d
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        grid = grid_of(q, ctx.d, tiles["BLOCK"])
        sizes = (N, D, ctx.R, ctx.d, D**-0.5, D**-0.5 * LOG2E)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](q, k, v, do, lse, delta, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, do, lse, delta, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None, None, None


def dilated_window_attention_autograd(q, k, v, R, d):
    return DilatedWindowAttention.apply(q, k, v, R, d)
