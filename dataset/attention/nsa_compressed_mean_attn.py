"""Attention to means of blocks: a query sees each block of W tokens that has ended as one key and one value.

Forward    K'_c, V'_c = means of K and V over the tokens of block c,   P_ic = softmax over the c with
           (c + 1) W <= i + 1 of s <q_i, K'_c>,  O = P V';  O_i = 0 for the queries before the first end
Backward   dS = P * (dO V'^T - delta),  delta_i = <dO_i, O_i>,  dQ = s dS K',
           dK'_c = s sum_i dS_ic q_i,  dV'_c = sum_i P_ic dO_i,
           dK_j = dK'_c / W,  dV_j = dV'_c / W for each token j of block c; 0 after the last whole block

Forward schedule: a kernel makes the means, in fp32 and rounded once. A program owns a query tile and walks
the blocks that have ended before its last query: N / W keys at most. lse is saved, in units of log2.
Backward schedule: with W = 32, a few thousand tokens are a tile or two of means: their owners alone would
leave a GPU idle while each walks every query. So the queries that a tile of means is met by are split over
programs, each of which stores a part of dK' and dV'. The parts have to be added somewhere, and each sum has
to be spread over W tokens: one kernel, whose program owns a block of tokens, does both, so dK' and dV' are
never stored as such. It writes every token, zeros after the last whole block included. dQ keeps its owner.

op: compressed_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634
SPLIT = 256  # queries a part


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
def mean_kernel(x_ptr, mean_ptr, N, D, W, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr):
    c, C = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    w, d = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr + (head * N + c * W) * D, w, d, W, D).to(tl.float32)
    mean = tl.sum(x, axis=0) / W
    tl.store(mean_ptr + (head * C + c) * D + d, mean.to(mean_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def compressed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, C, D, W, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * N * D, rows, d, N, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a query may see nothing
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((first + BLOCK) // W, C), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * C * D, cols, d, C, D)
        v = load_tile(v_ptr + head * C * D, cols, d, C, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < (rows[:, None] + 1) // W, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(total > 0.0, total, 1.0)
    store_tile(o_ptr + head * N * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head * N + rows, m + tl.log2(total), mask=rows < N)


def compressed_forward(q, k, v, W):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    if D > 128 or not 1 <= W <= 128:
        raise ValueError(f"a head of {D} or a block of {W} does not fit one tile")
    C, tiles = N // W, tiling(q)
    means = torch.empty((2, B, H, C, D), device=q.device, dtype=q.dtype)
    for x, mean in zip((k, v), means, strict=True):
        mean_kernel[(C, B * H)](x, mean, N, D, W, BLOCK_W=triton.next_power_of_2(W), BLOCK_D=tiles["BLOCK_D"])
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    compressed_kernel[grid](q, means[0], means[1], o, lse, N, C, D, W, D**-0.5 * LOG2E, **tiles)
    return o, lse, means


@autodiff(inputs_require_grad=(0, 1, 2))
def compressed_attention(q, k, v, W):
    """q, k, v: (batch, heads, tokens, dim); W: tokens a block."""
    return compressed_forward(q.contiguous(), k.contiguous(), v.contiguous(), W)[0]


def reference(q, k, v, W):
    B, H, N, D = q.shape
    C = N // W
    k, v = (x[:, :, : C * W].reshape(B, H, C, W, D).mean(3) for x in (k, v))
    ended = (torch.arange(C, device=q.device) + 1) * W <= torch.arange(N, device=q.device)[:, None] + 1
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(~ended, -1e30)
    return (torch.softmax(s, dim=-1) * ended) @ v


SWEEP = [
    {"B": 2, "H": 16, "N": 4096, "W": 32, "D": 64},
    {"B": 1, "H": 12, "N": 3001, "W": 20, "D": 128},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "N": 67, "W": 8, "D": 16},
    {"B": 2, "H": 1, "N": 41, "W": 1, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3)), {"W": dims["W"]}


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, W, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of means; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    ended = cols[None, :] < (rows[:, None] + 1) // W
    p = tl.exp2(tl.where(ended, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, C, D, W, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * N * D, rows, d, N, D)
    do = load_tile(do_ptr + head * N * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head * N + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head * N + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((first + BLOCK) // W, C), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * C * D, cols, d, C, D)
        v = load_tile(v_ptr + head * C * D, cols, d, C, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, W, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * N * D, dq * scale, rows, d, N, D)


@triton.jit
def mean_grad_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, parts_ptr, N, C, D, W, scale, scale_log2,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A part of dK' and dV' of a tile of means, from the queries of one split."""
    head, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * C * D, cols, d, C, D)
    v = load_tile(v_ptr + head * C * D, cols, d, C, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    begin = tl.maximum(split * SPLIT, ((first + 1) * W - 1) // BLOCK * BLOCK)  # the first query to see one
    for start in range(begin, tl.minimum((split + 1) * SPLIT, N), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * N * D, rows, d, N, D)
        do = load_tile(do_ptr + head * N * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head * N + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head * N + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, W, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    part = (head * tl.num_programs(1) + split) * 2 * C * D
    store_tile(parts_ptr + part, dk * scale, cols, d, C, D)
    store_tile(parts_ptr + part + C * D, dv, cols, d, C, D)


@triton.jit
def spread_kernel(parts_ptr, dk_ptr, dv_ptr, N, C, D, W, G, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds the G parts of a block's dK' and dV', and gives each of its tokens its share."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, d = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    whole = (d < D) & (c < C)
    dk = tl.zeros([BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_D], dtype=tl.float32)
    for g in range(G):
        part = parts_ptr + (head * G + g) * 2 * C * D + c * D + d
        dk += tl.load(part, mask=whole, other=0.0)
        dv += tl.load(part + C * D, mask=whole, other=0.0)
    tokens = tl.minimum(N - c * W, W)
    spread = tl.zeros([BLOCK_W, BLOCK_D], dtype=tl.float32)
    store_tile(dk_ptr + (head * N + c * W) * D, spread + dk[None, :] / W, w, d, tokens, D)
    store_tile(dv_ptr + (head * N + c * W) * D, spread + dv[None, :] / W, w, d, tokens, D)


class CompressedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, W):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse, means = compressed_forward(q, k, v, W)
        ctx.save_for_backward(q, o, lse, means)
        ctx.W = W
        return o

    @staticmethod
    def backward(ctx, do):
        q, o, lse, means = ctx.saved_tensors
        do, needs, W = do.contiguous(), ctx.needs_input_grad, ctx.W
        (B, H, N, D), C, tiles = q.shape, means.shape[3], tiling(q)
        BLOCK, BLOCK_D, G = tiles["BLOCK"], tiles["BLOCK_D"], triton.cdiv(N, SPLIT)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=BLOCK_D)
        seen = (q, means[0], means[1], do, lse, delta)
        sizes = (N, C, D, W, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(triton.cdiv(N, BLOCK), B * H)](*seen, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv, parts = torch.empty_like(q), torch.empty_like(q), lse.new_empty((B, H, G, 2, C, D))
            mean_grad_kernel[(triton.cdiv(C, BLOCK), G, B * H)](*seen, parts, *sizes, SPLIT=SPLIT, **tiles)
            spread_kernel[(triton.cdiv(N, W), B * H)](
                parts, dk, dv, N, C, D, W, G, BLOCK_W=triton.next_power_of_2(W), BLOCK_D=BLOCK_D
            )
        return dq, dk if needs[1] else None, dv if needs[2] else None, None


def compressed_attention_autograd(q, k, v, W):
    return CompressedAttention.apply(q, k, v, W)
