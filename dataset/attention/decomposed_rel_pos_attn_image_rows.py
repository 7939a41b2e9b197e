"""Attention over an image with a position bias in two parts, one for the key's row and one for its column.

Forward    query i, key j = (y, x) of a Y by X image:  S_ij = s <q_i, k_j> + h_iy + w_ix,
           P = softmax(S),  O = P V;  h is (.., M, Y) and w (.., M, X), each query's own
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           dh_iy = sum_x dS_i(y,x),   dw_ix = sum_y dS_i(y,x)

Forward schedule: a tile of keys is one image row, all x of one y. Then the bias of a step is a number a
query, h_iy, and a tile that does not change with the step, w_i, which is loaded once and stays in registers.
The M x N bias, as large as the scores, is never made. lse is saved, in units of log2.
Backward schedule: the same tiles make the two sums fall apart. A query tile's owner walks image rows: the row
sum of a step's dS is all of dh_iy, stored as it comes, and dw is the sum of the steps' dS, a register tile as
large as one of them, stored at the end. With tiles across rows both would be scattered sums. dK and dV have
owners of image rows of keys, who walk the queries and read w as a tile and h as a column. Each gradient has
one writer.

op: decomposed_bias_attention
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


def tiling(q, w):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D, BLOCK_X = (max(16, triton.next_power_of_2(tensor.shape[-1])) for tensor in (q, w))
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_X": BLOCK_X, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores(q, k, h, w, x, X, scale, PRECISION: tl.constexpr):
    """Scores of queries by an image row of keys, in units of log2, -inf beyond the row's end."""
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + h[:, None] + w) * LOG2E
    return tl.where(x[None, :] < X, s, -float("inf"))


@triton.jit
def decomposed_kernel(
    q_ptr, k_ptr, v_ptr, h_ptr, w_ptr, o_ptr, lse_ptr, M, Y, X, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, x, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    w = load_tile(w_ptr + head * M * X, rows, x, M, X).to(tl.float32)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for y in range(Y):
        k = load_tile(k_ptr + (head * Y + y) * X * D, x, d, X, D)
        v = load_tile(v_ptr + (head * Y + y) * X * D, x, d, X, D)
        h = tl.load(h_ptr + (head * M + rows) * Y + y, mask=rows < M, other=0.0).to(tl.float32)
        s = scores(q, k, h, w, x, X, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * M * D, acc / total[:, None], rows, d, M, D)
    tl.store(lse_ptr + head * M + rows, m + tl.log2(total), mask=rows < M)


def decomposed_forward(q, k, v, h, w):
    (B, H, M, D), Y, X = q.shape, h.shape[3], w.shape[3]
    if k.shape != (B, H, Y * X, D) or v.shape != k.shape or Y * X == 0:
        raise ValueError("k and v must have q's heads and one key a pixel, and the image some pixels")
    if h.shape != (B, H, M, Y) or w.shape != (B, H, M, X) or max(D, X) > 128:
        raise ValueError("h or w do not fit q, or an image row does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q, w)
    lse = torch.empty((B, H, M), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), B * H)
    decomposed_kernel[grid](q, k, v, h, w, o, lse, M, Y, X, D, D**-0.5, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def decomposed_bias_attention(q, k, v, h, w):
    """q: (batch, heads, M, dim); k, v: (batch, heads, Y * X, dim); h: (.., M, Y); w: (.., M, X)."""
    return decomposed_forward(*(tensor.contiguous() for tensor in (q, k, v, h, w)))[0]


def reference(q, k, v, h, w):
    bias = (h[..., :, None] + w[..., None, :]).flatten(-2)
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + bias, dim=-1) @ v


SWEEP = [
    {"B": 1, "H": 12, "M": 4096, "Y": 64, "X": 64, "D": 64},
    {"B": 25, "H": 12, "M": 196, "Y": 14, "X": 14, "D": 80},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "M": 35, "Y": 5, "X": 7, "D": 16},
    {"B": 2, "H": 1, "M": 20, "Y": 2, "X": 18, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, Y, X, D = (dims[key] for key in ("B", "H", "M", "Y", "X", "D"))
    shapes = ((M, D), (Y * X, D), (Y * X, D), (M, Y), (M, X))
    return tuple(torch.randn(B, H, *shape, device=device, dtype=dtype) for shape in shapes)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, h, w, lse, delta, x, X, scale, PRECISION: tl.constexpr):
    """P and dS of queries by an image row of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, h, w, x, X, scale, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, h_ptr, w_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dh_ptr, dw_ptr, M, Y, X, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, x, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    w = load_tile(w_ptr + head * M * X, rows, x, M, X).to(tl.float32)
    lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
    delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dw = tl.zeros([BLOCK, BLOCK_X], dtype=tl.float32)
    for y in range(Y):
        k = load_tile(k_ptr + (head * Y + y) * X * D, x, d, X, D)
        v = load_tile(v_ptr + (head * Y + y) * X * D, x, d, X, D)
        at = (head * M + rows) * Y + y
        h = tl.load(h_ptr + at, mask=rows < M, other=0.0).to(tl.float32)
        _, ds = rebuild_p_ds(q, k, v, do, h, w, lse, delta, x, X, scale, PRECISION)
        tl.store(dh_ptr + at, tl.sum(ds, axis=1).to(dh_ptr.dtype.element_ty), mask=rows < M)
        dw += ds
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dw_ptr + head * M * X, dw, rows, x, M, X)
    store_tile(dq_ptr + head * M * D, dq * scale, rows, d, M, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, h_ptr, w_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, M, Y, X, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    y, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x, d = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_D)
    key_at = (head * Y + y) * X * D
    k = load_tile(k_ptr + key_at, x, d, X, D)
    v = load_tile(v_ptr + key_at, x, d, X, D)
    dk = tl.zeros([BLOCK_X, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_X, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * M * D, rows, d, M, D)
        do = load_tile(do_ptr + head * M * D, rows, d, M, D)
        w = load_tile(w_ptr + head * M * X, rows, x, M, X).to(tl.float32)
        h = tl.load(h_ptr + (head * M + rows) * Y + y, mask=rows < M, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
        delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, h, w, lse, delta, x, X, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + key_at, dk * scale, x, d, X, D)
    store_tile(dv_ptr + key_at, dv, x, d, X, D)


class DecomposedBiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, h, w):
        inputs = tuple(tensor.contiguous() for tensor in (q, k, v, h, w))
        o, lse = decomposed_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        *inputs, o, lse = ctx.saved_tensors
        q, _, _, h, w = inputs
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, M, D), Y, X, tiles = q.shape, h.shape[3], w.shape[3], tiling(q, w)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * M, 32),)](
            o, do, delta, B * H * M, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        grads = [torch.empty_like(tensor) for tensor in inputs]
        dq, dk, dv, dh, dw = grads
        seen, sizes = (*inputs, do, lse, delta), (M, Y, X, D, D**-0.5)
        if needs[0] or needs[3] or needs[4]:
            query_kernel[(triton.cdiv(M, tiles["BLOCK"]), B * H)](*seen, dq, dh, dw, *sizes, **tiles)
        if needs[1] or needs[2]:
            key_kernel[(Y, B * H)](*seen, dk, dv, *sizes, **tiles)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def decomposed_bias_attention_autograd(q, k, v, h, w):
    return DecomposedBiasAttention.apply(q, k, v, h, w)
