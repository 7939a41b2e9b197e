"""Cross-entropy of a linear layer, with the gradient of the logits made in chunks of rows.

Forward    z_iv = x_i . W_v,  l_i = lse_v(z_iv) - z_{i, t_i}
Backward   G_iv = (exp(z_iv - lse_i) - [v = t_i]) dl_i,   dX = G W,   dW = G^T X

Forward schedule: a program owns (row tile, segment of the vocabulary), makes its logits tile by tile from
dots over all of D, and keeps a maximum, a sum and the target's logit if it comes by. A second kernel merges
the segments of a row. No logit is stored.
Backward schedule: G is needed twice, in two orders, and is too large to keep: M V numbers. So the rows are
cut in chunks whose part of G is about as large as X itself, and one buffer of that size serves all chunks.
For each: its tiles of G are rebuilt from dots and lse and stored; dX of the chunk is one product with W,
complete; dW gets its part of a sum over chunks from the owners of its tiles, who read what the chunk before
has left and add to it, launch after launch, in fp32 and without atomics. Logits are made again once rather
than once for each gradient, for a buffer that costs less than the inputs.

op: fused_linear_cross_entropy
schedule: recompute_from_stats, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SEGMENT = 16  # tiles of the vocabulary


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def logits(x_ptr, w_ptr, rows, v, M, V, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, rows, d, M, D)
        w = load_tile(w_ptr, v, d, V, D)
        z = tl.dot(x, tl.trans(w), z, input_precision=PRECISION)
    return z


@triton.jit
def segment_kernel(
    x_ptr, w_ptr, target_ptr, max_ptr, sum_ptr, z_target_ptr, M, V, D,
    SEGMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + rows, mask=rows < M, other=-1)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    z_target = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(1) * SEGMENT * BLOCK
    for start in range(first, tl.minimum(first + SEGMENT * BLOCK, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = logits(x_ptr, w_ptr, rows, v, M, V, D, PRECISION, BLOCK)
        z_target += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), axis=1)
        z = tl.where(v[None, :] < V, z, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new[:, None]), axis=1)
        m = m_new
    own = tl.program_id(1) * M + rows
    tl.store(max_ptr + own, m, mask=rows < M)
    tl.store(sum_ptr + own, total, mask=rows < M)
    tl.store(z_target_ptr + own, z_target, mask=rows < M)


@triton.jit
def merge_kernel(
    max_ptr, sum_ptr, z_target_ptr, loss_ptr, lse_ptr, M, segments, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < M
    m = tl.load(max_ptr + rows, mask=mask, other=0.0)
    total = tl.load(sum_ptr + rows, mask=mask, other=1.0)
    z_target = tl.load(z_target_ptr + rows, mask=mask, other=0.0)
    for segment in range(1, segments):
        other = tl.load(max_ptr + segment * M + rows, mask=mask, other=0.0)
        m_new = tl.maximum(m, other)
        total *= tl.exp(m - m_new)
        total += tl.load(sum_ptr + segment * M + rows, mask=mask, other=0.0) * tl.exp(other - m_new)
        z_target += tl.load(z_target_ptr + segment * M + rows, mask=mask, other=0.0)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=mask)
    tl.store(loss_ptr + rows, lse - z_target, mask=mask)


def linear_ce_forward(x, w, target):
    (M, D), V = x.shape, w.shape[0]
    tiles = tiles_of(x)
    segments = triton.cdiv(V, SEGMENT * tiles["BLOCK"])
    part = torch.empty((3, segments, M), device=x.device, dtype=torch.float32)
    loss, lse = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(M, tiles["BLOCK"]), segments)
    segment_kernel[grid](x, w, target, *part, M, V, D, SEGMENT=SEGMENT, **tiles)
    merge_kernel[(triton.cdiv(M, 128),)](*part, loss, lse, M, segments, BLOCK=128)
    return loss, lse


@autodiff(inputs_require_grad=(0, 1))
def linear_cross_entropy(x, w, target):
    """x: (M, D); w: (V, D); target: int64 (M). Returns a loss a row in float32."""
    return linear_ce_forward(x.contiguous(), w.contiguous(), target.contiguous())[0]


def reference(x, w, target):
    return torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="none")


SWEEP = [{"M": 4096, "D": 1024, "V": 32000}, {"M": 1021, "D": 768, "V": 50257}]
SWEEP_CPU = [{"M": 70, "D": 24, "V": 150}, {"M": 9, "D": 40, "V": 530}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype) / dims["D"] ** 0.5
    return x, w, torch.randint(0, dims["V"], (dims["M"],), device=device)


# ---- backward ----


@triton.jit
def logit_gradient_kernel(
    x_ptr, w_ptr, target_ptr, lse_ptr, dloss_ptr, g_ptr, first, last, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = logits(x_ptr, w_ptr, rows, v, M, V, D, PRECISION, BLOCK)
    there = rows < last
    target = tl.load(target_ptr + rows, mask=there, other=-1)
    lse = tl.load(lse_ptr + rows, mask=there, other=0.0)
    dloss = tl.load(dloss_ptr + rows, mask=there, other=0.0)
    g = (tl.exp(z - lse[:, None]) - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * dloss[:, None]
    offs = (rows - first)[:, None].to(tl.int64) * V + v[None, :]
    tl.store(g_ptr + offs, g.to(g_ptr.dtype.element_ty), mask=there[:, None] & (v[None, :] < V))


@triton.jit
def dx_kernel(
    g_ptr, w_ptr, dx_ptr, R, V, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        g = load_tile(g_ptr, rows, v, R, V)
        dx = tl.dot(g, load_tile(w_ptr, v, d, V, D), dx, input_precision=PRECISION)
    mask = (rows[:, None] < R) & (d[None, :] < D)
    tl.store(dx_ptr + rows[:, None].to(tl.int64) * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_kernel(
    g_ptr, x_ptr, dw_ptr, R, V, D, FIRST: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = v[:, None].to(tl.int64) * D + d[None, :]
    mask = (v[:, None] < V) & (d[None, :] < D)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    if not FIRST:
        dw += tl.load(dw_ptr + offs, mask=mask, other=0.0)
    for start in range(0, R, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        g = load_tile(g_ptr, rows, v, R, V)
        dw = tl.dot(tl.trans(g), load_tile(x_ptr, rows, d, R, D), dw, input_precision=PRECISION)
    tl.store(dw_ptr + offs, dw, mask=mask)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target):
        x, w, target = x.contiguous(), w.contiguous(), target.contiguous()
        loss, lse = linear_ce_forward(x, w, target)
        ctx.save_for_backward(x, w, target, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, target, lse = ctx.saved_tensors
        dloss = dloss.contiguous()
        (M, D), V = x.shape, w.shape[0]
        tiles = tiles_of(x)
        BLOCK = tiles["BLOCK"]
        chunk = max(1, triton.cdiv(M * D, V * BLOCK)) * BLOCK  # rows, so that chunk x V is about M x D
        down, across = triton.cdiv(V, BLOCK), triton.cdiv(D, BLOCK)
        g = torch.empty((chunk, V), device=x.device, dtype=x.dtype)
        needs = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs[0] else None
        dw = torch.zeros((V, D), device=x.device, dtype=torch.float32) if needs[1] else None
        for first in range(0, M, chunk):
            last = min(first + chunk, M)
            R, side = last - first, triton.cdiv(last - first, BLOCK)
            logit_gradient_kernel[(side, down)](x, w, target, lse, dloss, g, first, last, M, V, D, **tiles)
            if needs[0]:
                dx_kernel[(side, across)](g, w, dx[first:last], R, V, D, **tiles)
            if needs[1]:
                dw_kernel[(down, across)](g, x[first:last], dw, R, V, D, FIRST=first == 0, **tiles)
        return dx, dw.to(w.dtype) if needs[1] else None, None


def linear_cross_entropy_autograd(x, w, target):
    return LinearCrossEntropy.apply(x, w, target)
