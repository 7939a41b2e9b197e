"""Large-margin cosine loss with normalisations and product inside (CosFace): cosines are never stored.

Forward    a_i = (|x_i|^2 + e)^(-1/2),  b_j = (|w_j|^2 + e)^(-1/2),  c_ij = a_i b_j <x_i, w_j>,
           z_ij = k (c_ij - m [j = t_i]),  l_i = lse_j(z_ij) - z_{i, t_i}
Backward   g_ij = k dl_i (exp(z_ij - lse_i) - [j = t_i]) is the gradient of c_ij.  That of a normalised row
           v a, a = (|v|^2 + e)^(-1/2), for an upstream u is a (u - v a <v a, u>).  For x_i it is
           u = sum_j g_ij b_j w_j, so that <x_i a_i, u> = sum_j g_ij c_ij:
           dx_i = a_i (sum_j g_ij b_j w_j - a_i x_i sum_j g_ij c_ij), and with the sides exchanged
           dw_j = b_j (sum_i g_ij a_i x_i - b_j w_j sum_i g_ij c_ij)

Forward schedule: a kernel makes a and b. The owner of a tile of rows then walks all classes, scales a tile of
dots to cosines, and keeps an online log-sum-exp; the target's cosine passes by. Normalised copies of x and w,
the second as large as the layer, are not made.
Backward schedule: a normalisation wants the projection of its upstream, which seems to need the finished sum,
and a pass more. But the projection is a sum of g c over the tiles that are walked anyway: each owner adds it
beside its product, and applies it as it stores. So dx has owners of (rows, column chunk) who walk the
classes, dw owners of (classes, column chunk) who walk the rows, each rebuilds its tiles of cosines from dots,
and there is no third kernel. In bf16 the operand g b is rounded; the sum is of the rounded numbers too, times
a <x_i, w_j>, as the gradient would otherwise be left with a part along x_i.

op: cosface_linear
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


EPS = 1e-12


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def inverse_norm_kernel(v_ptr, a_ptr, R, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    square = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        v = load_tile(v_ptr, rows, start + tl.arange(0, BLOCK_D), R, D).to(tl.float32)
        square += v * v
    tl.store(a_ptr + rows, tl.rsqrt(tl.sum(square, axis=1) + eps), mask=rows < R)


@triton.jit
def dots(x_ptr, w_ptr, i, j, M, C, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """The tile (i, j) of <x_i, w_j>."""
    q = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        w = tl.trans(load_tile(w_ptr, j, d, C, D))
        q = tl.dot(load_tile(x_ptr, i, d, M, D), w, q, input_precision=PRECISION)
    return q


@triton.jit
def cosface_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, target_ptr, loss_ptr, lse_ptr, M, C, D, k, margin,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + i, mask=i < M, other=0)
    a = tl.load(a_ptr + i, mask=i < M, other=0.0)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    z_target = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        b = tl.load(b_ptr + j, mask=j < C, other=0.0)
        c = a[:, None] * b[None, :] * dots(x_ptr, w_ptr, i, j, M, C, D, PRECISION, BLOCK)
        hit = j[None, :] == target[:, None]
        z = k * (c - tl.where(hit, margin, 0.0))
        z_target += tl.sum(tl.where(hit, z, 0.0), axis=1)
        z = tl.where(j[None, :] < C, z, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new[:, None]), axis=1)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + i, lse, mask=i < M)
    tl.store(loss_ptr + i, lse - z_target, mask=i < M)


def cosface_forward(x, w, target, scale, margin):
    (M, D), C, tiles = x.shape, w.shape[0], tiles_of(x)
    if D < 2:
        raise ValueError("a normalised row of one column is a sign, which has no gradient")
    a = torch.empty(M, device=x.device, dtype=torch.float32)
    b = torch.empty(C, device=x.device, dtype=torch.float32)
    loss, lse = torch.empty_like(a), torch.empty_like(a)
    for rows, inverse in ((x, a), (w, b)):
        grid = (triton.cdiv(rows.shape[0], 16),)
        inverse_norm_kernel[grid](rows, inverse, rows.shape[0], D, EPS, BLOCK_R=16, BLOCK_D=64)
    cosface_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](
        x, w, a, b, target, loss, lse, M, C, D, scale, margin, **tiles
    )
    return loss, a, b, lse


@autodiff(inputs_require_grad=(0, 1))
def cosface_linear(x, w, target, scale=30.0, margin=0.35):
    """x: (M, D); w: (C, D); target: int64 (M); gives (M) in float32."""
    return cosface_forward(x.contiguous(), w.contiguous(), target.contiguous(), scale, margin)[0]


def reference(x, w, target, scale=30.0, margin=0.35):
    x = x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + EPS)
    w = w * torch.rsqrt(w.pow(2).sum(1, keepdim=True) + EPS)
    hit = torch.nn.functional.one_hot(target, w.shape[0])
    return torch.nn.functional.cross_entropy(scale * (x @ w.t() - margin * hit), target, reduction="none")


SWEEP = [{"M": 1024, "D": 512, "C": 10575}, {"M": 509, "D": 260, "C": 8191}]
SWEEP_CPU = [{"M": 21, "D": 24, "C": 70}, {"M": 35, "D": 70, "C": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, C = dims["M"], dims["D"], dims["C"]
    w = torch.randn(C, D, device=device)
    target = torch.randint(0, C, (M,), device=device)
    x = 0.5 * w[target] + torch.randn(M, D, device=device)
    return x.to(dtype), w.to(dtype), target, 16.0


# ---- backward ----


@triton.jit
def cosine_gradient(c, target_ptr, lse_ptr, dloss_ptr, i, j, M, C, k, margin):
    """The tile (i, j) of g; 0 outside."""
    target = tl.load(target_ptr + i, mask=i < M, other=0)
    lse = tl.load(lse_ptr + i, mask=i < M, other=0.0)
    dloss = tl.load(dloss_ptr + i, mask=i < M, other=0.0)
    hit = j[None, :] == target[:, None]
    inside = (i[:, None] < M) & (j[None, :] < C)
    p = tl.exp(tl.where(inside, k * (c - tl.where(hit, margin, 0.0)) - lse[:, None], 0.0))
    g = k * dloss[:, None] * (p - tl.where(hit, 1.0, 0.0))
    return tl.where(inside, g, 0.0)


@triton.jit
def store_projected(grad_ptr, v_ptr, upstream, along, inverse, rows, d, R, D):
    """inverse (upstream - inverse v along), the gradient of a tile of rows of v."""
    v = load_tile(v_ptr, rows, d, R, D).to(tl.float32)
    grad = inverse[:, None] * (upstream - (inverse * along)[:, None] * v)
    mask = (rows[:, None] < R) & (d[None, :] < D)
    offs = rows[:, None].to(tl.int64) * D + d[None, :]
    tl.store(grad_ptr + offs, grad.to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, M, C, D, k, margin,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    a = tl.load(a_ptr + i, mask=i < M, other=0.0)
    upstream = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        b = tl.load(b_ptr + j, mask=j < C, other=0.0)
        w = load_tile(w_ptr, j, d, C, D)
        q = dots(x_ptr, w_ptr, i, j, M, C, D, PRECISION, BLOCK)
        c = a[:, None] * b[None, :] * q
        g = cosine_gradient(c, target_ptr, lse_ptr, dloss_ptr, i, j, M, C, k, margin)
        r = (g * b[None, :]).to(w.dtype)
        upstream = tl.dot(r, w, upstream, input_precision=PRECISION)
        along += tl.sum(r.to(tl.float32) * q, axis=1)
    store_projected(dx_ptr, x_ptr, upstream, a * along, a, i, d, M, D)


@triton.jit
def dw_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, target_ptr, lse_ptr, dloss_ptr, dw_ptr, M, C, D, k, margin,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.load(b_ptr + j, mask=j < C, other=0.0)
    upstream = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + i, mask=i < M, other=0.0)
        x = load_tile(x_ptr, i, d, M, D)
        q = dots(x_ptr, w_ptr, i, j, M, C, D, PRECISION, BLOCK)
        c = a[:, None] * b[None, :] * q
        g = cosine_gradient(c, target_ptr, lse_ptr, dloss_ptr, i, j, M, C, k, margin)
        r = (g * a[:, None]).to(x.dtype)
        upstream = tl.dot(tl.trans(r), x, upstream, input_precision=PRECISION)
        along += tl.sum(r.to(tl.float32) * q, axis=0)
    store_projected(dw_ptr, w_ptr, upstream, b * along, b, j, d, C, D)


class CosFaceLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target, scale, margin):
        x, w, target = x.contiguous(), w.contiguous(), target.contiguous()
        loss, a, b, lse = cosface_forward(x, w, target, scale, margin)
        ctx.save_for_backward(x, w, a, b, target, lse)
        ctx.constants = scale, margin
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, *rows = ctx.saved_tensors
        (M, D), C = x.shape, w.shape[0]
        tiles = {**tiles_of(x), "BLOCK_D": 64 if x.dtype == torch.float32 else 128, "num_warps": 8}
        args, sizes = (x, w, *rows, dloss.contiguous()), (M, C, D, *ctx.constants)
        chunks = triton.cdiv(D, tiles["BLOCK_D"])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, tiles["BLOCK"]), chunks)](*args, dx, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            dw_kernel[(triton.cdiv(C, tiles["BLOCK"]), chunks)](*args, dw, *sizes, **tiles)
        return dx, dw, None, None, None


def cosface_linear_autograd(x, w, target, scale=30.0, margin=0.35):
    return CosFaceLinear.apply(x, w, target, scale, margin)
