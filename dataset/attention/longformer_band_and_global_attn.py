"""Long-document attention: a band around each token, and a few global ones that see and are seen by all.

Forward    tokens 0 .. G - 1 are global.  i sees j if |i - j| <= W, or i < G, or j < G;
           P = softmax of s Q K^T over what is seen,  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           all 0 where nothing is seen

Forward schedule: a program owns a tile of tokens. What it walks is a run of tiles: all of them, if one of its
tokens is global; else two runs, the global ones and those that meet the band, the second beginning after the
first where they overlap. Elements are masked too. lse is saved, in units of log2.
Backward schedule: "i sees j" is symmetric, so a key tile's owner walks exactly the runs of queries that a
query tile's owner walks of keys: both kernels take the runs from one helper, and the mask from another. A
global tile has N tokens to walk where others have 2 W + G: with G at most a tile or two these few programs
are the last to end, and come first in the grid, so that they begin first. Work is O(N (W + G)) all over.

op: band_global_attention
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
def run_of(run, first, N, W, G, BLOCK: tl.constexpr):
    """Where run 0 or 1 of the tiles to walk begins and ends, for the tile of tokens that begins at first."""
    ends_global = tl.minimum((G + BLOCK - 1) // BLOCK * BLOCK, N)
    if first < G:  # run 0 is everything, run 1 nothing
        begin, end = run * N, run * 0 + N
    else:
        begin = run * tl.maximum(tl.maximum(first - W, 0) // BLOCK * BLOCK, ends_global)
        end = tl.where(run == 0, ends_global, tl.minimum(first + BLOCK + W, N))
    return begin, end


@triton.jit
def sees(rows, cols, N, W, G):
    """Which of a tile's pairs see each other."""
    i, j = rows[:, None], cols[None, :]
    near = (i - j <= W) & (j - i <= W)
    return (near | (i < G) | (j < G)) & (i < N) & (j < N)


@triton.jit
def band_global_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, W, G, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a row may see nothing of its first tile
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for run in range(2):
        begin, end = run_of(run, first, N, W, G, BLOCK)
        for start in range(begin, end, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + head * D, cols, d, N, D)
            v = load_tile(v_ptr + head * D, cols, d, N, D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            s = tl.where(sees(rows, cols, N, W, G), s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            m = m_new
    total = tl.where(rows < N, total, 1.0)
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def band_global_forward(q, k, v, W, G):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    if D > 128 or W < 0 or G < 0:
        raise ValueError(f"a head of {D} does not fit one tile, or {W} and {G} are no numbers of tokens")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    band_global_kernel[grid](q, k, v, o, lse, N, D, W, G, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def band_global_attention(q, k, v, W, G):
    """q, k, v: (batch, heads, tokens, dim); W: tokens to either side; the first G tokens are global."""
    return band_global_forward(q.contiguous(), k.contiguous(), v.contiguous(), W, G)[0]


def reference(q, k, v, W, G):
    i = torch.arange(q.shape[2], device=q.device)
    seen = ((i[:, None] - i).abs() <= W) | (i[:, None] < G) | (i < G)
    s = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 2, "H": 12, "N": 4096, "W": 256, "G": 16, "D": 64},
    {"B": 1, "H": 8, "N": 3001, "W": 100, "G": 70, "D": 128},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "N": 100, "W": 9, "G": 3, "D": 16},
    {"B": 2, "H": 1, "N": 40, "W": 2, "G": 35, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    qkv = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return qkv, {"W": dims["W"], "G": dims["G"]}


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, W, G, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for run in range(2):
        begin, end = run_of(run, first, N, W, G, BLOCK)
        for start in range(begin, end, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + head * D, cols, d, N, D)
            v = load_tile(v_ptr + head * D, cols, d, N, D)
            seen = sees(rows, cols, N, W, G)
            _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, W, G, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for run in range(2):
        begin, end = run_of(run, first, N, W, G, BLOCK)
        for start in range(begin, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            q = load_tile(q_ptr + head * D, rows, d, N, D)
            do = load_tile(do_ptr + head * D, rows, d, N, D)
            lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
            delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
            seen = sees(rows, cols, N, W, G)
            p, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class BandGlobalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, W, G):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = band_global_forward(q, k, v, W, G)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.W, ctx.G = W, G
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), tiles = q.shape, tiling(q)
        grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
        sizes = (N, D, ctx.W, ctx.G, D**-0.5, D**-0.5 * LOG2E)
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


def band_global_attention_autograd(q, k, v, W, G):
    return BandGlobalAttention.apply(q, k, v, W, G)
