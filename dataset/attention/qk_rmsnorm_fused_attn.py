"""Causal attention of normalised queries and keys: RMS norm, with weights, is part of the kernels.

Forward    xhat = x r,  r = (mean x^2 + eps)^(-1/2) for each row x of Q and K,  Y = Qhat * wq,  Z = Khat * wk,
           P = softmax(s Y Z^T) over j <= i,  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dY = s dS Z,  dZ = s dS^T Y,
           and through the norm, row by row, with  g = dY * wq:
           dq = r (g - qhat mean(g qhat)),  dwq = sum over all rows of dY * qhat;   the same for k

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal. A head's row lies in
the tile whole, so a tile is normalised as it is loaded: one row sum beside a dot. Y and Z, two tensors as
large as Q and K, never reach memory. lse is saved, in units of log2.
Backward schedule: the owner of a query tile ends its walk with dY whole in registers, the key tile's owner
ends with dZ. The norm's backward is a row reduction and needs nothing else, so it is an epilogue of either,
and dY and dZ are not stored either. dwq and dwk sum over every row of every head: each owner adds up its tile
and stores D numbers, a last kernel adds these parts. Norms as layers of their own would read or write four
more tensors forwards and six backwards.

op: qknorm_attention
schedule: swap_owner, row_reduce_correct, partials_then_reduce, recompute_from_stats
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
def load_normed(ptr, w, rows, d, N, D, eps):
    """xhat and r of a tile, in fp32, and xhat w in the tensor's type."""
    x = load_tile(ptr, rows, d, N, D)
    x32 = x.to(tl.float32)
    r = tl.rsqrt(tl.sum(x32 * x32, axis=1) / D + eps)
    xhat = x32 * r[:, None]
    return xhat, r, (xhat * w[None, :]).to(x.dtype)


@triton.jit
def normed(ptr, w, rows, d, N, D, eps):
    _, _, y = load_normed(ptr, w, rows, d, N, D, eps)
    return y


@triton.jit
def qknorm_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, o_ptr, lse_ptr, N, D, eps, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    wq = tl.load(wq_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wk = tl.load(wk_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = normed(q_ptr + head * D, wq, rows, d, N, D, eps)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = normed(k_ptr + head * D, wk, cols, d, N, D, eps)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(y, tl.trans(z), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def qknorm_forward(q, k, v, wq, wk, eps):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or not wq.shape == wk.shape == (D,):
        raise ValueError("q, k and v must have one shape, and the weights that of a row")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    qknorm_kernel[grid](q, k, v, wq, wk, o, lse, N, D, eps, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def qknorm_attention(q, k, v, wq, wk, eps=1e-5):
    """q, k, v: (batch, heads, tokens, dim); wq, wk: (dim)."""
    return qknorm_forward(*(tensor.contiguous() for tensor in (q, k, v, wq, wk)), eps)[0]


def reference(q, k, v, wq, wk, eps=1e-5):
    N, D = q.shape[-2:]
    y, z = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w for x, w in ((q, wq), (k, wk)))
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    s = (D**-0.5 * y @ z.transpose(-1, -2)).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 34, "D": 32}, {"B": 2, "H": 1, "N": 40, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    wq, wk = (1 + 0.2 * torch.randn(dims["D"], device=device, dtype=dtype) for _ in range(2))
    return q, k, v, wq, wk


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(y, z, v, do, lse, delta, rows, cols, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(y, tl.trans(z), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] <= rows[:, None], s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def norm_backward(dy, xhat, r, w, D):
    """dx of a tile, and its share of dw."""
    g = dy * w[None, :]
    dx = r[:, None] * (g - xhat * (tl.sum(g * xhat, axis=1) / D)[:, None])
    return dx, tl.sum(dy * xhat, axis=0)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, part_ptr,
    N, D, eps, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    wq = tl.load(wq_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wk = tl.load(wk_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = normed(q_ptr + head * D, wq, rows, d, N, D, eps)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dy = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = normed(k_ptr + head * D, wk, cols, d, N, D, eps)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(y, z, v, do, lse, delta, rows, cols, scale_log2, PRECISION)
        dy = tl.dot(ds.to(z.dtype), z, dy, input_precision=PRECISION)
    qhat, r, _ = load_normed(q_ptr + head * D, wq, rows, d, N, D, eps)  # again, not held through the loop
    dq, dwq = norm_backward(dy * scale, qhat, r, wq, D)
    store_tile(dq_ptr + head * D, dq, rows, d, N, D)
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + part * D + d, dwq, mask=d < D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, part_ptr,
    N, D, eps, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    wq = tl.load(wq_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wk = tl.load(wk_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    z = normed(k_ptr + head * D, wk, cols, d, N, D, eps)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dz = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        y = normed(q_ptr + head * D, wq, rows, d, N, D, eps)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(y, z, v, do, lse, delta, rows, cols, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dz = tl.dot(tl.trans(ds.to(y.dtype)), y, dz, input_precision=PRECISION)
    khat, r, _ = load_normed(k_ptr + head * D, wk, cols, d, N, D, eps)
    dk, dwk = norm_backward(dz * scale, khat, r, wk, D)
    store_tile(dk_ptr + head * D, dk, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + part * D + d, dwk, mask=d < D)


@triton.jit
def weight_sum_kernel(part_ptr, dw_ptr, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        dw += load_tile(part_ptr, start + tl.arange(0, BLOCK_G), d, G, D)
    tl.store(dw_ptr + d, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=d < D)


class QKNormAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, wq, wk, eps):
        q, k, v, wq, wk = (tensor.contiguous() for tensor in (q, k, v, wq, wk))
        o, lse = qknorm_forward(q, k, v, wq, wk, eps)
        ctx.save_for_backward(q, k, v, wq, wk, o, lse)
        ctx.eps = eps
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, wq, wk, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), tiles = q.shape, tiling(q)
        T = triton.cdiv(N, tiles["BLOCK"])
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, wq, wk, do, lse, delta)
        sizes, parts = (N, D, ctx.eps, D**-0.5, D**-0.5 * LOG2E), B * H * T
        grads = [torch.empty_like(tensor) for tensor in (q, k, v, wq, wk)]
        dq, dk, dv, dwq, dwk = grads
        part = lse.new_empty((2, parts, D))
        if needs[0] or needs[3]:
            query_kernel[(T, B * H)](*seen, dq, part[0], *sizes, **tiles)
        if needs[1] or needs[2] or needs[4]:
            key_kernel[(T, B * H)](*seen, dk, dv, part[1], *sizes, **tiles)
        for at, dw in ((3, dwq), (4, dwk)):
            if needs[at]:
                grid = (triton.cdiv(D, 16),)
                weight_sum_kernel[grid](part[at - 3], dw, parts, D, BLOCK_G=128, BLOCK_D=16)
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=False)), None


def qknorm_attention_autograd(q, k, v, wq, wk, eps=1e-5):
    return QKNormAttention.apply(q, k, v, wq, wk, eps)
