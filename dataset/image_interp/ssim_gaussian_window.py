"""Structural similarity of two images under a Gaussian window, its mean over each: a reconstruction loss.

Forward    the window g of K taps is separable; at every place where it fits,
           mx = g*x, my = g*y, sxx = g*(xx) - mx^2, syy = g*(yy) - my^2, sxy = g*(xy) - mx my,
           S = A1 A2 / (B1 B2),  A1 = 2 mx my + c1,  A2 = 2 sxy + c2,
           B1 = mx^2 + my^2 + c1,  B2 = sxx + syy + c2;
           loss_n = mean of S over the places and channels of image n
Backward   with s = dloss_n / places, by the blurred maps g*x, g*(xx), g*(xy):
           e = dS/d(g*(xx)) = dS/d(g*(yy)) = -s S / B2,   f = dS/d(g*(xy)) = 2 s A1 / (B1 B2),
           p = dS/d(g*x) = 2 s my (A2 - A1) / (B1 B2) - 2 s S mx (1 / B1 - 1 / B2), and q with x, y swapped;
           dx = g'*p + 2 x (g'*e) + y (g'*f),  dy = g'*q + 2 y (g'*e) + x (g'*f),  g' the transposed blur

Forward schedule: a first kernel blurs along rows and makes the five moment maps from x and y on the way; a
second blurs along columns, stores the five moments of each place, forms S and leaves one sum a tile; a third
adds the tiles of an image. Two passes of K taps stand for K^2.
Backward schedule: what x and y feed are five maps, so their gradients come from four (xx and yy share e), and
all K^2 windows over a pixel are seen through two transposed blurs. The first kernel is pointwise: moments to
p, q, e, f. A blur along columns, transposed, is a gather: the owner of a row-blurred pixel takes the
K outputs that it fed. The last kernel gathers along rows and multiplies with x and y in its registers, so the
maps g'*p and so on are never stored. No atomics, and all reads are along rows.

op: ssim_loss
schedule: gather_transpose, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def row_blur_kernel(x_ptr, y_ptr, g_ptr, rows_ptr, n, W, OW, K, BLOCK: tl.constexpr):
    """Five maps of n = planes H OW numbers each."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = o // OW * W + o % OW
    mx = tl.zeros([BLOCK], dtype=tl.float32)
    my = tl.zeros([BLOCK], dtype=tl.float32)
    xx = tl.zeros([BLOCK], dtype=tl.float32)
    yy = tl.zeros([BLOCK], dtype=tl.float32)
    xy = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        g = tl.load(g_ptr + k)
        x = tl.load(x_ptr + at + k, mask=o < n, other=0.0)
        y = tl.load(y_ptr + at + k, mask=o < n, other=0.0)
        mx += g * x
        my += g * y
        xx += g * x * x
        yy += g * y * y
        xy += g * x * y
    tl.store(rows_ptr + o, mx, mask=o < n)
    tl.store(rows_ptr + n + o, my, mask=o < n)
    tl.store(rows_ptr + 2 * n + o, xx, mask=o < n)
    tl.store(rows_ptr + 3 * n + o, yy, mask=o < n)
    tl.store(rows_ptr + 4 * n + o, xy, mask=o < n)


@triton.jit
def ssim_terms(mx, my, xx, yy, xy, c1, c2):
    A1 = 2 * mx * my + c1
    A2 = 2 * (xy - mx * my) + c2
    B1 = mx * mx + my * my + c1
    B2 = (xx - mx * mx) + (yy - my * my) + c2
    return A1, A2, B1, B2


@triton.jit
def column_blur_kernel(
    rows_ptr,
    g_ptr,
    moments_ptr,
    part_ptr,
    n_rows,
    n_out,
    places,
    C,
    H,
    OH,
    OW,
    K,
    c1,
    c2,
    BLOCK: tl.constexpr,
):
    """A tile of the places of one image, C OH OW of them."""
    image = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < places
    at = (image * C + o // (OH * OW)) * H * OW + o % (OH * OW)
    mx = tl.zeros([BLOCK], dtype=tl.float32)
    my = tl.zeros([BLOCK], dtype=tl.float32)
    xx = tl.zeros([BLOCK], dtype=tl.float32)
    yy = tl.zeros([BLOCK], dtype=tl.float32)
    xy = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        g = tl.load(g_ptr + k)
        tap = rows_ptr + at + k * OW
        mx += g * tl.load(tap, mask=mask, other=0.0)
        my += g * tl.load(tap + n_rows, mask=mask, other=0.0)
        xx += g * tl.load(tap + 2 * n_rows, mask=mask, other=0.0)
        yy += g * tl.load(tap + 3 * n_rows, mask=mask, other=0.0)
        xy += g * tl.load(tap + 4 * n_rows, mask=mask, other=0.0)
    own = moments_ptr + image * places + o
    tl.store(own, mx, mask=mask)
    tl.store(own + n_out, my, mask=mask)
    tl.store(own + 2 * n_out, xx, mask=mask)
    tl.store(own + 3 * n_out, yy, mask=mask)
    tl.store(own + 4 * n_out, xy, mask=mask)
    A1, A2, B1, B2 = ssim_terms(mx, my, xx, yy, xy, c1, c2)
    S = tl.where(mask, A1 * A2 / (B1 * B2), 0.0)
    tl.store(part_ptr + image * tl.num_programs(1) + tl.program_id(1), tl.sum(S, axis=0))


@triton.jit
def mean_kernel(part_ptr, loss_ptr, tiles, places, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + image * tiles + i, mask=i < tiles, other=0.0)
    tl.store(loss_ptr + image, tl.sum(total, axis=0) / places)


def ssim_forward(x, y, g, c1, c2):
    (N, C, H, W), K = x.shape, g.numel()
    OH, OW = H - K + 1, W - K + 1
    if x.shape != y.shape or C < 1 or OH < 1 or OW < 1:
        raise ValueError(f"a window of {K} does not fit images {tuple(x.shape)} and {tuple(y.shape)}")
    rows = torch.empty((5, N, C, H, OW), device=x.device, dtype=torch.float32)
    moments = torch.empty((5, N, C, OH, OW), device=x.device, dtype=torch.float32)
    n_rows, n_out, places = N * C * H * OW, N * C * OH * OW, C * OH * OW
    tiles = triton.cdiv(places, BLOCK)
    part = torch.empty((N, tiles), device=x.device, dtype=torch.float32)
    loss = torch.empty(N, device=x.device, dtype=torch.float32)
    row_blur_kernel[(triton.cdiv(n_rows, BLOCK),)](x, y, g, rows, n_rows, W, OW, K, BLOCK=BLOCK)
    column_blur_kernel[(N, tiles)](
        rows, g, moments, part, n_rows, n_out, places, C, H, OH, OW, K, c1, c2, BLOCK=BLOCK
    )
    mean_kernel[(N,)](part, loss, tiles, places, BLOCK=BLOCK)
    return loss, moments


@autodiff(inputs_require_grad=(0, 1))
def ssim(x, y, g, c1=1e-4, c2=9e-4):
    """x, y: (N, C, H, W) float32; g: (K), one axis of the window; gives (N)."""
    return ssim_forward(x.contiguous(), y.contiguous(), g.contiguous(), c1, c2)[0]


def reference(x, y, g, c1=1e-4, c2=9e-4):
    C = x.shape[1]
    window = (g[:, None] * g)[None, None].expand(C, 1, -1, -1)

    def blur(z):
        return torch.nn.functional.conv2d(z, window, groups=C)

    mx, my = blur(x), blur(y)
    sxx, syy, sxy = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    S = (2 * mx * my + c1) * (2 * sxy + c2) / ((mx * mx + my * my + c1) * (sxx + syy + c2))
    return S.mean(dim=(1, 2, 3))


SWEEP = [{"N": 16, "C": 3, "H": 256, "W": 256, "K": 11}, {"N": 5, "C": 3, "H": 401, "W": 299, "K": 7}]
SWEEP_CPU = [{"N": 1, "C": 2, "H": 15, "W": 17, "K": 5}, {"N": 2, "C": 1, "H": 20, "W": 12, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Two noisy pictures that have something in common; constants as for numbers of about 1."""
    shape, K = (dims["N"], dims["C"], dims["H"], dims["W"]), dims["K"]
    common = torch.randn(shape, device=device, dtype=dtype)
    x, y = (common + 0.5 * torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    tap = torch.arange(K, device=device, dtype=dtype) - (K - 1) / 2
    g = torch.exp(-tap * tap / 4.5)
    return (x, y, g / g.sum()), {"c1": 0.01, "c2": 0.09}


# ---- backward ----


@triton.jit
def map_gradients_kernel(moments_ptr, dloss_ptr, maps_ptr, n_out, places, c1, c2, BLOCK: tl.constexpr):
    """p, q, e and f of each place."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < n_out
    mx = tl.load(moments_ptr + o, mask=mask, other=0.0)
    my = tl.load(moments_ptr + n_out + o, mask=mask, other=0.0)
    xx = tl.load(moments_ptr + 2 * n_out + o, mask=mask, other=0.0)
    yy = tl.load(moments_ptr + 3 * n_out + o, mask=mask, other=0.0)
    xy = tl.load(moments_ptr + 4 * n_out + o, mask=mask, other=0.0)
    A1, A2, B1, B2 = ssim_terms(mx, my, xx, yy, xy, c1, c2)
    s = tl.load(dloss_ptr + o // places, mask=mask, other=0.0) / places
    across = 2 * s * (A2 - A1) / (B1 * B2)
    along = 2 * s * (A1 * A2 / (B1 * B2)) * (1 / B1 - 1 / B2)
    tl.store(maps_ptr + o, my * across - mx * along, mask=mask)
    tl.store(maps_ptr + n_out + o, mx * across - my * along, mask=mask)
    tl.store(maps_ptr + 2 * n_out + o, -s * A1 * A2 / (B1 * B2 * B2), mask=mask)
    tl.store(maps_ptr + 3 * n_out + o, 2 * s * A1 / (B1 * B2), mask=mask)


@triton.jit
def column_gather_kernel(maps_ptr, g_ptr, drows_ptr, n_rows, n_out, H, OH, OW, K, BLOCK: tl.constexpr):
    """Each of four maps, from places back to the rows that fed them; the map is program 1."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1).to(tl.int64)
    i = o // OW % H
    plane = maps_ptr + which * n_out + o // (H * OW) * OH * OW + o % OW
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        mask = (o < n_rows) & (i - k >= 0) & (i - k < OH)
        acc += tl.load(g_ptr + k) * tl.load(plane + (i - k) * OW, mask=mask, other=0.0)
    tl.store(drows_ptr + which * n_rows + o, acc, mask=o < n_rows)


@triton.jit
def row_gather_kernel(
    x_ptr, y_ptr, drows_ptr, g_ptr, dx_ptr, dy_ptr, n_in, n_rows, W, OW, K, BLOCK: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = o % W
    row = drows_ptr + o // W * OW
    p = tl.zeros([BLOCK], dtype=tl.float32)
    q = tl.zeros([BLOCK], dtype=tl.float32)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    f = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        mask = (o < n_in) & (j - k >= 0) & (j - k < OW)
        g = tl.load(g_ptr + k)
        p += g * tl.load(row + j - k, mask=mask, other=0.0)
        q += g * tl.load(row + n_rows + j - k, mask=mask, other=0.0)
        e += g * tl.load(row + 2 * n_rows + j - k, mask=mask, other=0.0)
        f += g * tl.load(row + 3 * n_rows + j - k, mask=mask, other=0.0)
    x = tl.load(x_ptr + o, mask=o < n_in, other=0.0)
    y = tl.load(y_ptr + o, mask=o < n_in, other=0.0)
    tl.store(dx_ptr + o, p + 2 * x * e + y * f, mask=o < n_in)
    tl.store(dy_ptr + o, q + 2 * y * e + x * f, mask=o < n_in)


class SSIM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, g, c1, c2):
        x, y, g = x.contiguous(), y.contiguous(), g.contiguous()
        loss, moments = ssim_forward(x, y, g, c1, c2)
        ctx.save_for_backward(x, y, g, moments)
        ctx.constants = c1, c2
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, y, g, moments = ctx.saved_tensors
        (N, C, H, W), (OH, OW), K = x.shape, moments.shape[3:], g.numel()
        n_in, n_rows, n_out = x.numel(), N * C * H * OW, N * C * OH * OW
        maps = torch.empty((4, n_out), device=x.device, dtype=torch.float32)
        drows = torch.empty((4, n_rows), device=x.device, dtype=torch.float32)
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        map_gradients_kernel[(triton.cdiv(n_out, BLOCK),)](
            moments, dloss.contiguous(), maps, n_out, C * OH * OW, *ctx.constants, BLOCK=BLOCK
        )
        column_gather_kernel[(triton.cdiv(n_rows, BLOCK), 4)](
            maps, g, drows, n_rows, n_out, H, OH, OW, K, BLOCK=BLOCK
        )
        row_gather_kernel[(triton.cdiv(n_in, BLOCK),)](
            x, y, drows, g, dx, dy, n_in, n_rows, W, OW, K, BLOCK=BLOCK
        )
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dy if needs[1] else None, None, None, None


def ssim_autograd(x, y, g, c1=1e-4, c2=9e-4):
    return SSIM.apply(x, y, g, c1, c2)
