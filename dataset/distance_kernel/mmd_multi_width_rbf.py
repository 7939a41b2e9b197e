"""Maximum mean discrepancy of two samples, with Gaussian kernels of several widths.

Forward    k(p, q) = sum_b exp(-|p - q|^2 / (2 t 4^b)) for b = 0 .. B - 1,
           l = mean k(x_i, x_j) + mean k(y_i, y_j) - 2 mean k(x_i, y_j)
           With all points in one list z, and a = 1 / M for those of x, -1 / N for those of y:
           l = sum_ij a_i a_j k(z_i, z_j)
Backward   with k'_ij = sum_b exp(-|z_i - z_j|^2 / (2 t 4^b)) / (t 4^b), and i standing on both sides:
           dz_i = -2 dl a_i sum_j a_j k'_ij (z_i - z_j)

Forward schedule: a program owns a tile of the list, walks the whole list and stores its share of l; a second
kernel adds. The signed weights make three means one walk over one matrix.
Backward schedule: k is symmetric, so the owner of a point takes both of its roles in one walk, of twice the
weight; there is one launch for both samples and no atomics. The three means taken apart would be four walks.
A point and itself: k is constant there, but as (sum_j w_ij) z_i - sum_j w_ij z_j the two large terms of j = i
would cancel only up to rounding, and with many features nothing else is as large; they are left out.

op: mmd
schedule: swap_owner, recompute_from_stats, partials_then_reduce
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_points(x_ptr, y_ptr, i, f, M, N, D):
    """Rows of the list: first those of x, then those of y."""
    x_mask = (i[:, None] < M) & (f[None, :] < D)
    y_mask = (i[:, None] >= M) & (i[:, None] < M + N) & (f[None, :] < D)
    x = tl.load(x_ptr + i[:, None].to(tl.int64) * D + f[None, :], mask=x_mask, other=0.0)
    y = tl.load(y_ptr + (i[:, None].to(tl.int64) - M) * D + f[None, :], mask=y_mask, other=0.0)
    return tl.where(x_mask, x, y)


@triton.jit
def weights(i, M, N):
    return tl.where(i < M, 1.0 / M, tl.where(i < M + N, -1.0 / N, 0.0))


@triton.jit
def squared_distances(x_ptr, y_ptr, i, j, M, N, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    product = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    i_square = tl.zeros([BLOCK], dtype=tl.float32)
    j_square = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        f = start + tl.arange(0, BLOCK)
        p, q = load_points(x_ptr, y_ptr, i, f, M, N, D), load_points(x_ptr, y_ptr, j, f, M, N, D)
        product = tl.dot(p, tl.trans(q), product, input_precision=PRECISION)
        i_square += tl.sum(p * p, axis=1)
        j_square += tl.sum(q * q, axis=1)
    return tl.where(i[:, None] == j[None, :], 0.0, i_square[:, None] + j_square[None, :] - 2 * product)


@triton.jit
def mmd_kernel(
    x_ptr, y_ptr, part_ptr, M, N, D, t, WIDTHS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M + N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        e = squared_distances(x_ptr, y_ptr, i, j, M, N, D, PRECISION, BLOCK) / (-2 * t)
        k = tl.exp(e)
        for b in tl.static_range(1, WIDTHS):
            k += tl.exp(e / 4**b)
        share += tl.sum(weights(j, M, N)[None, :] * k, axis=1)
    tl.store(part_ptr + tl.program_id(0), tl.sum(weights(i, M, N) * share, axis=0))


@triton.jit
def sum_kernel(part_ptr, l_ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + slot, mask=slot < count, other=0.0)
    tl.store(l_ptr, tl.sum(total, axis=0))


def dot_precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@autodiff(inputs_require_grad=(0, 1))
def mmd_loss(x, y, t=1.0, widths=3):
    """x: (M, D), y: (N, D), float32; t: the least squared width, each next one is four times that."""
    if x.shape[1] != y.shape[1] or t <= 0:
        raise ValueError("x and y must have the same features, and the width must be positive")
    x, y = x.contiguous(), y.contiguous()
    (M, D), N = x.shape, y.shape[0]
    tiles = triton.cdiv(M + N, 32)
    part = torch.empty(tiles, device=x.device, dtype=torch.float32)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    mmd_kernel[(tiles,)](x, y, part, M, N, D, t, WIDTHS=widths, PRECISION=dot_precision(), BLOCK=32)
    sum_kernel[(1,)](part, loss, tiles, BLOCK=256)
    return loss


def reference(x, y, t=1.0, widths=3):
    def mean_kernel(p, q):
        square = (p[:, None, :] - q).pow(2).sum(-1)
        return sum(torch.exp(-square / (2 * t * 4**b)).mean() for b in range(widths))

    return mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)


SWEEP = [{"M": 4096, "N": 4096, "D": 64}, {"M": 1021, "N": 3000, "D": 256}]
SWEEP_CPU = [{"M": 30, "N": 26, "D": 8}, {"M": 9, "N": 70, "D": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    D = dims["D"]
    x = torch.randn(dims["M"], D, device=device, dtype=dtype)
    y = 0.4 + 1.2 * torch.randn(dims["N"], D, device=device, dtype=dtype)
    return x, y, D / 4


# ---- backward ----


@triton.jit
def mmd_backward_kernel(
    x_ptr, y_ptr, dl_ptr, dx_ptr, dy_ptr, M, N, D, t,
    WIDTHS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    pulled = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M + N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        e = squared_distances(x_ptr, y_ptr, i, j, M, N, D, PRECISION, BLOCK) / (-2 * t)
        slope = tl.exp(e)
        for b in tl.static_range(1, WIDTHS):
            slope += tl.exp(e / 4**b) / 4**b
        w = tl.where(i[:, None] == j[None, :], 0.0, weights(j, M, N)[None, :] * slope)
        total += tl.sum(w, axis=1)
        pulled = tl.dot(w, load_points(x_ptr, y_ptr, j, f, M, N, D), pulled, input_precision=PRECISION)
    moved = total[:, None] * load_points(x_ptr, y_ptr, i, f, M, N, D) - pulled
    dz = moved * (-2 / t * tl.load(dl_ptr) * weights(i, M, N))[:, None]
    inside = f[None, :] < D
    tl.store(dx_ptr + i[:, None].to(tl.int64) * D + f[None, :], dz, mask=inside & (i[:, None] < M))
    y_mask = inside & (i[:, None] >= M) & (i[:, None] < M + N)
    tl.store(dy_ptr + (i[:, None].to(tl.int64) - M) * D + f[None, :], dz, mask=y_mask)


class MMDLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, t, widths):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        ctx.t, ctx.widths = t, widths
        return mmd_loss(x, y, t, widths)

    @staticmethod
    def backward(ctx, dl):
        x, y = ctx.saved_tensors
        (M, D), N = x.shape, y.shape[0]
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        tiles = {"WIDTHS": ctx.widths, "PRECISION": dot_precision(), "BLOCK": 32, "BLOCK_D": 64}
        grid = (triton.cdiv(M + N, 32), triton.cdiv(D, 64))
        mmd_backward_kernel[grid](x, y, dl, dx, dy, M, N, D, ctx.t, **tiles)
        return dx if ctx.needs_input_grad[0] else None, dy if ctx.needs_input_grad[1] else None, None, None


def mmd_loss_autograd(x, y, t=1.0, widths=3):
    return MMDLoss.apply(x, y, t, widths)
