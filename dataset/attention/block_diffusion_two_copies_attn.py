"""Attention of a block-diffusion language model: a noisy and a clean copy of a sequence, in blocks of W.

Forward    i and j in blocks I and J.  A noisy query sees the noisy keys of its own block, J = I, and the
           clean keys of the blocks before, J < I; a clean query sees the clean keys with J <= I:
           P = softmax(s Q K^T) over the keys seen,   O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,   dQ = s dS K,   dK = s dS^T Q,   dV = P^T dO;
           a noisy key has the noisy queries of its block, a clean one in block J the clean queries from
           block J on, and the noisy ones from block J + 1 on

Forward schedule: both copies in one call, a program for (query tile, copy, head). The mask is of blocks, so
it becomes loop bounds: a noisy tile walks the few noisy keys of its own blocks, then the clean prefix, in one
online softmax; a mask of 2T x 2T would be three quarters zeros. lse is saved, in units of log2.
Backward schedule: the bounds are mirrored. The owner of a key tile, (tile, copy, head), walks first the
queries of its own copy, to its block's end if noisy and to the sequence's if clean, then, if clean, the noisy
queries of later blocks: a clean key is trained by both copies, and both sums meet in one program's registers.
dQ keeps the forward's ownership and bounds. Tiles need not be multiples of W; masks settle the edges.

op: block_diffusion_attention
schedule: swap_owner, recompute_from_stats
difficulty: 5
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
    single, BLOCK_D = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[4]))
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
def query_bounds(tile, clean, T, W, BLOCK: tl.constexpr):
    """Of a query tile: the noisy keys from begin to end, and the clean keys to prefix."""
    last = tl.minimum((tile + 1) * BLOCK, T) - 1
    begin = tile * BLOCK // W * W
    end = tl.minimum((last // W + 1) * W, T)
    return begin, tl.where(clean == 1, begin, end), tl.where(clean == 1, end, last // W * W)


@triton.jit
def attend(q, k, v, seen, m, total, acc, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    s = tl.where(seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_new, total * rescale + tl.sum(p, axis=1), acc


@triton.jit
def block_diffusion_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, T, D, W, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    clean = tl.program_id(1) % 2
    own = tl.program_id(1).to(tl.int64) * T
    noisy, other = own, (tl.program_id(1) // 2 * 2 + 1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + own * D, rows, d, T, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a tile may have no key for some row
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    begin, end, prefix = query_bounds(tl.program_id(0), clean, T, W, BLOCK)
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + noisy * D, cols, d, T, D)
        v = load_tile(v_ptr + noisy * D, cols, d, T, D)
        seen = (cols[None, :] < T) & (cols[None, :] // W == rows[:, None] // W)
        m, total, acc = attend(q, k, v, seen, m, total, acc, scale_log2, PRECISION)
    for start in range(0, prefix, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + other * D, cols, d, T, D)
        v = load_tile(v_ptr + other * D, cols, d, T, D)
        seen = (cols[None, :] < T) & (cols[None, :] // W + 1 - clean <= rows[:, None] // W)
        m, total, acc = attend(q, k, v, seen, m, total, acc, scale_log2, PRECISION)
    total = tl.where(rows < T, total, 1.0)
    store_tile(o_ptr + own * D, acc / total[:, None], rows, d, T, D)
    tl.store(lse_ptr + own + rows, m + tl.log2(total), mask=rows < T)


def block_diffusion_forward(q, k, v, W):
    B, H, copies, T, D = q.shape
    if not q.shape == k.shape == v.shape or copies != 2:
        raise ValueError("q, k and v must have one shape, with a noisy and a clean copy")
    if W < 1:
        raise ValueError(f"a block of {W} tokens has no keys")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, 2, T), device=q.device, dtype=torch.float32)
    block_diffusion_kernel[(triton.cdiv(T, tiles["BLOCK"]), 2 * B * H)](
        q, k, v, o, lse, T, D, W, D**-0.5 * LOG2E, **tiles
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def block_diffusion_attention(q, k, v, W):
    """q, k, v: (B, H, 2, T, D), the noisy copy before the clean one; W: tokens in a block."""
    return block_diffusion_forward(q.contiguous(), k.contiguous(), v.contiguous(), W)[0]


def reference(q, k, v, W):
    block = torch.arange(q.shape[3], device=q.device) // W
    same, before = block[:, None] == block, block[:, None] > block
    upper = torch.cat([same, before], dim=1)
    mask = torch.cat([upper, torch.cat([torch.zeros_like(same), same | before], dim=1)], dim=0)
    Q, K, V = (x.flatten(2, 3) for x in (q, k, v))
    s = (q.shape[-1] ** -0.5 * Q @ K.transpose(-1, -2)).masked_fill(~mask, -float("inf"))
    return (torch.softmax(s, dim=-1) @ V).view_as(q)


SWEEP = [
    {"B": 2, "H": 16, "T": 2048, "D": 128, "W": 32},
    {"B": 1, "H": 6, "T": 1021, "D": 64, "W": 20},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 41, "D": 16, "W": 12}, {"B": 1, "H": 1, "T": 70, "D": 20, "W": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], 2, dims["T"], dims["D"])
    return *(torch.randn(shape, device=device, dtype=dtype) for _ in range(3)), dims["W"]


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, rows_total, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, rows_total, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, rows_total, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < rows_total)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
    return p, p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
def add_queries(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, copy, rows, seen, T, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key tile, with what a tile of queries of one copy adds."""
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + copy * D, rows, d, T, D)
    do = load_tile(do_ptr + copy * D, rows, d, T, D)
    lse = tl.load(lse_ptr + copy + rows, mask=rows < T, other=0.0)
    delta = tl.load(delta_ptr + copy + rows, mask=rows < T, other=0.0)
    p, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    return tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION), dv


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, T, D, W, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    clean = tl.program_id(1) % 2
    own = tl.program_id(1).to(tl.int64) * T
    noisy = (tl.program_id(1) // 2 * 2).to(tl.int64) * T
    first = tl.program_id(0) * BLOCK
    last = tl.minimum(first + BLOCK, T) - 1
    cols = first + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + own * D, cols, d, T, D)
    v = load_tile(v_ptr + own * D, cols, d, T, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    end = tl.where(clean == 1, T, tl.minimum((last // W + 1) * W, T))
    for start in range(first // W * W, end, BLOCK):  # queries of the keys' own copy
        rows = start + tl.arange(0, BLOCK)
        apart = rows[:, None] // W - cols[None, :] // W
        seen = (rows[:, None] < T) & (cols[None, :] < T) & ((apart == 0) | ((apart > 0) & (clean == 1)))
        dk, dv = add_queries(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, own, rows, seen, T, D, scale_log2,
            PRECISION, BLOCK_D,
        )  # fmt: skip
    for start in range(tl.where(clean == 1, (first // W + 1) * W, T), T, BLOCK):  # noisy ones of a clean key
        rows = start + tl.arange(0, BLOCK)
        seen = (rows[:, None] < T) & (cols[None, :] < T) & (rows[:, None] // W > cols[None, :] // W)
        dk, dv = add_queries(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, noisy, rows, seen, T, D, scale_log2,
            PRECISION, BLOCK_D,
        )  # fmt: skip
    store_tile(dk_ptr + own * D, dk * scale, cols, d, T, D)
    store_tile(dv_ptr + own * D, dv, cols, d, T, D)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, T, D, W, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    clean = tl.program_id(1) % 2
    own = tl.program_id(1).to(tl.int64) * T
    noisy, other = own, (tl.program_id(1) // 2 * 2 + 1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + own * D, rows, d, T, D)
    do = load_tile(do_ptr + own * D, rows, d, T, D)
    lse = tl.load(lse_ptr + own + rows, mask=rows < T, other=0.0)
    delta = tl.load(delta_ptr + own + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    begin, end, prefix = query_bounds(tl.program_id(0), clean, T, W, BLOCK)
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + noisy * D, cols, d, T, D)
        v = load_tile(v_ptr + noisy * D, cols, d, T, D)
        seen = (rows[:, None] < T) & (cols[None, :] < T) & (cols[None, :] // W == rows[:, None] // W)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    for start in range(0, prefix, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + other * D, cols, d, T, D)
        v = load_tile(v_ptr + other * D, cols, d, T, D)
        seen = (rows[:, None] < T) & (cols[None, :] < T)
        seen = seen & (cols[None, :] // W + 1 - clean <= rows[:, None] // W)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + own * D, dq * scale, rows, d, T, D)


class BlockDiffusionAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, W):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = block_diffusion_forward(q, k, v, W)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.W = W
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do, needs, tiles = do.contiguous(), ctx.needs_input_grad, tiling(q)
        B, H, _, T, D = q.shape
        grid, sizes = (triton.cdiv(T, tiles["BLOCK"]), 2 * B * H), (T, D, ctx.W, D**-0.5, D**-0.5 * LOG2E)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        delta, rows = torch.empty_like(lse), lse.numel()
        delta_kernel[(triton.cdiv(rows, 32),)](o, do, delta, rows, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"])
        if needs[0]:
            query_kernel[grid](q, k, v, do, lse, delta, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            key_kernel[grid](q, k, v, do, lse, delta, dk, dv, *sizes, **tiles)
        grads = zip((dq, dk, dv), needs[:3], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def block_diffusion_attention_autograd(q, k, v, W):
    return BlockDiffusionAttention.apply(q, k, v, W)
