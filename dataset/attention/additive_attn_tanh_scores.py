"""Additive attention: a score is a small network of query and key, not a product.

Forward    t_ijd = tanh(q_id + k_jd),  S_ij = sum_d w_d t_ijd,  P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,
           dq_id = w_d sum_j dS_ij (1 - t_ijd^2),   dk_jd = w_d sum_i dS_ij (1 - t_ijd^2),
           dw_d = sum_ij dS_ij t_ijd  over the batch

Forward schedule: what costs here is M N D values of tanh, and S, M N numbers, is small beside them: it is
made once, by owners of its tiles, and stored. A second kernel, over query tiles, takes softmax and V with an
online softmax; lse is saved.
Backward schedule: with S saved, P and dS need no tanh at all: owners of tiles make dS and store it, in two
walks over the keys. Scores that are sums over D are large, and where one key has nearly all of P, its dS is
a difference of nearly equal numbers, delta among them, which was rounded with O: the first walk sums P *
(dO V^T - delta), 0 but for that, and the second takes it away. Then each tanh is made once for dq and once
for dk, which sum over different axes of t. A program owns a tile of queries and a chunk of channels for dq,
or of keys and channels for dk, and walks the other side with a small block (i, j, d) in registers: channels
do not meet in a gradient, so they are split over programs, and each reads all of dS. Rebuilding dS in each
of them would cost all D values of tanh for every chunk. The owner of dq has dS t in registers too; its sums
for dw are parts, added by a last kernel.

op: additive_attention
schedule: swap_owner, partials_then_reduce, row_reduce_correct
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


def tiling(v):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_E": max(16, triton.next_power_of_2(v.shape[-1]))}


BLOCK, CHUNK = 16, 16  # queries and keys, and channels, of a block (i, j, d)


@triton.jit
def load_t(q_ptr, k_ptr, rows, cols, d, M, N, D):
    """t of a block (i, j, d)."""
    x = load_tile(q_ptr, rows, d, M, D)[:, None, :] + load_tile(k_ptr, cols, d, N, D)[None, :, :]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def score_kernel(q_ptr, k_ptr, w_ptr, s_ptr, M, N, D, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    b = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, CHUNK):
        d = start + tl.arange(0, CHUNK)
        w = tl.load(w_ptr + d, mask=d < D, other=0.0)
        t = load_t(q_ptr + b * M * D, k_ptr + b * N * D, rows, cols, d, M, N, D)
        s += tl.sum(t * w[None, None, :], axis=2)
    store_tile(s_ptr + b * M * N, s, rows, cols, M, N)


@triton.jit
def mix_kernel(
    s_ptr, v_ptr, o_ptr, lse_ptr, M, N, E,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    rows, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.where(cols[None, :] < N, load_tile(s_ptr + b * M * N, rows, cols, M, N), -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        rescale = tl.exp(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        v = load_tile(v_ptr + b * N * E, cols, e, N, E)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + b * M * E, acc / total[:, None], rows, e, M, E)
    tl.store(lse_ptr + b * M + rows, m + tl.log(total), mask=rows < M)


def additive_forward(q, k, v, w):
    (B, M, D), (_, N, E) = q.shape, v.shape
    if k.shape != (B, N, D) or v.shape != (B, N, E) or w.shape != (D,) or N == 0:
        raise ValueError("k, v or w do not fit q, or there are no keys")
    if E > 128:
        raise ValueError(f"values of dimension {E} do not fit one tile")
    s, o, lse, tiles = q.new_empty((B, M, N)), q.new_empty((B, M, E)), q.new_empty((B, M)), tiling(v)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK), B)
    score_kernel[grid](q, k, w, s, M, N, D, BLOCK=BLOCK, CHUNK=CHUNK)
    mix_kernel[(triton.cdiv(M, 32), B)](s, v, o, lse, M, N, E, **tiles)
    return o, s, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def additive_attention(q, k, v, w):
    """q: (batch, M, D); k: (batch, N, D); v: (batch, N, E); w: (D); N at least 1."""
    return additive_forward(*(tensor.contiguous() for tensor in (q, k, v, w)))[0]


def reference(q, k, v, w):
    s = torch.tanh(q[:, :, None] + k[:, None]) @ w
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 16, "M": 200, "N": 256, "D": 128, "E": 128},
    {"B": 7, "M": 131, "N": 300, "D": 200, "E": 64},
]
SWEEP_CPU = [
    {"B": 1, "M": 20, "N": 35, "D": 18, "E": 16},
    {"B": 2, "M": 9, "N": 7, "D": 5, "E": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, N, D, E = (dims[key] for key in ("B", "M", "N", "D", "E"))
    q = torch.randn(B, M, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, N, width, device=device, dtype=dtype) for width in (D, E))
    return q, k, v, torch.randn(D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_p_and_v(s_ptr, v_ptr, lse, rows, cols, e, M, N, E):
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    s = tl.where(mask, load_tile(s_ptr, rows, cols, M, N) - lse[:, None], -float("inf"))
    return tl.exp(s), load_tile(v_ptr, cols, e, N, E)


@triton.jit
def ds_kernel(
    s_ptr, lse_ptr, v_ptr, o_ptr, do_ptr, ds_ptr, M, N, E,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    rows, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    do = load_tile(do_ptr + b * M * E, rows, e, M, E)
    delta = tl.sum(do * load_tile(o_ptr + b * M * E, rows, e, M, E), axis=1)
    lse = tl.load(lse_ptr + b * M + rows, mask=rows < M, other=float("inf"))
    left = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        p, v = load_p_and_v(s_ptr + b * M * N, v_ptr + b * N * E, lse, rows, cols, e, M, N, E)
        left += tl.sum(p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None]), axis=1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        p, v = load_p_and_v(s_ptr + b * M * N, v_ptr + b * N * E, lse, rows, cols, e, M, N, E)
        ds = tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None]
        store_tile(ds_ptr + b * M * N, p * (ds - left[:, None]), rows, cols, M, N)


@triton.jit
def dv_kernel(
    s_ptr, lse_ptr, do_ptr, dv_ptr, M, N, E,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    cols, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    dv = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        lse = tl.load(lse_ptr + b * M + rows, mask=rows < M, other=float("inf"))
        p = tl.exp(load_tile(s_ptr + b * M * N, rows, cols, M, N) - lse[:, None])
        do = load_tile(do_ptr + b * M * E, rows, e, M, E)
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
    store_tile(dv_ptr + b * N * E, dv, cols, e, N, E)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, w_ptr, ds_ptr, dq_ptr, parts_ptr, M, N, D, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    b = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0)
    dq = tl.zeros([BLOCK, CHUNK], dtype=tl.float32)
    dw = tl.zeros([BLOCK, CHUNK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        t = load_t(q_ptr + b * M * D, k_ptr + b * N * D, rows, cols, d, M, N, D)
        ds = load_tile(ds_ptr + b * M * N, rows, cols, M, N)[:, :, None]
        dq += tl.sum(ds * (1 - t * t), axis=1)
        dw += tl.sum(ds * t, axis=1)
    store_tile(dq_ptr + b * M * D, dq * w[None, :], rows, d, M, D)
    part = b * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts_ptr + part * D + d, tl.sum(dw, axis=0), mask=d < D)


@triton.jit
def dk_kernel(q_ptr, k_ptr, w_ptr, ds_ptr, dk_ptr, M, N, D, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    b = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0)
    dk = tl.zeros([BLOCK, CHUNK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        t = load_t(q_ptr + b * M * D, k_ptr + b * N * D, rows, cols, d, M, N, D)
        ds = load_tile(ds_ptr + b * M * N, rows, cols, M, N)[:, :, None]
        dk += tl.sum(ds * (1 - t * t), axis=0)
    store_tile(dk_ptr + b * N * D, dk * w[None, :], cols, d, N, D)


@triton.jit
def dw_kernel(parts_ptr, dw_ptr, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        acc += load_tile(parts_ptr, start + tl.arange(0, BLOCK_G), d, G, D)
    tl.store(dw_ptr + d, tl.sum(acc, axis=0), mask=d < D)


class AdditiveAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w):
        q, k, v, w = q.contiguous(), k.contiguous(), v.contiguous(), w.contiguous()
        o, s, lse = additive_forward(q, k, v, w)
        ctx.save_for_backward(q, k, v, w, o, s, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, w, o, s, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, M, D), (_, N, E), tiles = q.shape, v.shape, tiling(v)
        G, chunks, blocks = triton.cdiv(M, BLOCK), triton.cdiv(D, CHUNK), {"BLOCK": BLOCK, "CHUNK": CHUNK}
        dq = dk = dv = dw = None
        if needs[2]:
            dv = torch.empty_like(v)
            dv_kernel[(triton.cdiv(N, 32), B)](s, lse, do, dv, M, N, E, **tiles)
        if needs[0] or needs[1] or needs[3]:
            ds = torch.empty_like(s)
            ds_kernel[(triton.cdiv(M, 32), B)](s, lse, v, o, do, ds, M, N, E, **tiles)
        if needs[0] or needs[3]:
            dq, parts = torch.empty_like(q), q.new_empty((B, G, D))
            dq_kernel[(G, chunks, B)](q, k, w, ds, dq, parts, M, N, D, **blocks)
        if needs[1]:
            dk = torch.empty_like(k)
            dk_kernel[(triton.cdiv(N, BLOCK), chunks, B)](q, k, w, ds, dk, M, N, D, **blocks)
        if needs[3]:
            dw = torch.empty_like(w)
            dw_kernel[(triton.cdiv(D, 16),)](parts, dw, B * G, D, BLOCK_G=64, BLOCK_D=16)
        return dq if needs[0] else None, dk, dv, dw


def additive_attention_autograd(q, k, v, w):
    return AdditiveAttention.apply(q, k, v, w)
