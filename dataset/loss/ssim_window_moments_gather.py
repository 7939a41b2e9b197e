"""Structural similarity of an image to a target, over a sliding window.

Forward    moments of a window with weights g_a g_b:  p = E[x], r = E[y], X = E[x^2], Q = E[y^2], C = E[x y];
           N1 = 2 p r + c1,  N2 = 2 (C - p r) + c2,  D1 = p^2 + r^2 + c1,  D2 = X - p^2 + Q - r^2 + c2,
           S = N1 N2 / (D1 D2), for each place where the window fits
Backward   x enters p, X and C. With dS of each window:
           A = dS/dp = 2 (r N2 - r N1) / (D1 D2) - 2 S (p / D1 - p / D2),
           B = dS/dX = -S / D2,   F = dS/dC = 2 N1 / (D1 D2);
           dx_u = sum over the windows w over u, weighted, of (A_w + 2 x_u B_w + y_u F_w) dS_w

Forward schedule: a program owns a tile of places and walks the taps, with five sums in registers.
Backward schedule: a window spreads its gradient over all its pixels, neighbours overlap, and pushed they
would meet in atomics. First the owners of windows rebuild the moments and store A, B and F, times dS. Then
the owner of a pixel gathers: x_u and y_u do not depend on the window and leave the sum, so that three
filterings of maps are all, with the taps turned around, and each pixel is stored once. No moment is saved by
the forward.

op: ssim
schedule: recompute_from_stats, gather_transpose
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


C1, C2 = 0.01**2, 0.03**2  # for numbers of about 0 to 1


@triton.jit
def moments(x_ptr, y_ptr, g_ptr, row, col, mask, W, K, BLOCK: tl.constexpr):
    p = tl.zeros([BLOCK], dtype=tl.float32)
    r = tl.zeros([BLOCK], dtype=tl.float32)
    X = tl.zeros([BLOCK], dtype=tl.float32)
    Q = tl.zeros([BLOCK], dtype=tl.float32)
    C = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(K * K):
        a, b = tap // K, tap % K
        g = tl.load(g_ptr + a) * tl.load(g_ptr + b)
        offs = (row + a) * W + col + b
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        y = tl.load(y_ptr + offs, mask=mask, other=0.0)
        p += g * x
        r += g * y
        X += g * x * x
        Q += g * y * y
        C += g * x * y
    return p, r, X, Q, C


@triton.jit
def factors(p, r, X, Q, C, c1, c2):
    return 2 * p * r + c1, 2 * (C - p * r) + c2, p * p + r * r + c1, X - p * p + Q - r * r + c2


@triton.jit
def ssim_kernel(x_ptr, y_ptr, g_ptr, s_ptr, H, W, K, c1, c2, BLOCK: tl.constexpr):
    plane = tl.program_id(1).to(tl.int64)
    rows, cols = H - K + 1, W - K + 1
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = w < rows * cols
    image = plane * H * W
    p, r, X, Q, C = moments(x_ptr + image, y_ptr + image, g_ptr, w // cols, w % cols, mask, W, K, BLOCK)
    N1, N2, D1, D2 = factors(p, r, X, Q, C, c1, c2)
    tl.store(s_ptr + plane * rows * cols + w, N1 * N2 / (D1 * D2), mask=mask)


def sizes(x, y, g):
    (P, H, W), K = x.shape, g.shape[0]
    if y.shape != x.shape or not 1 <= K <= min(H, W):
        raise ValueError(f"need planes of one shape, as large as the window of {K}")
    return P, H, W, K


@autodiff(inputs_require_grad=(0,))
def ssim(x, y, g):
    """x, y: (planes, H, W); g: (K), the window along an axis; gives (planes, H - K + 1, W - K + 1)."""
    x, y, g = x.contiguous(), y.contiguous(), g.contiguous()
    P, H, W, K = sizes(x, y, g)
    s = torch.empty((P, H - K + 1, W - K + 1), device=x.device, dtype=x.dtype)
    ssim_kernel[(triton.cdiv(s[0].numel(), 256), P)](x, y, g, s, H, W, K, C1, C2, BLOCK=256)
    return s


def reference(x, y, g):
    def filtered(image):
        return torch.nn.functional.conv2d(image[:, None], (g[:, None] * g)[None, None])[:, 0]

    p, r = filtered(x), filtered(y)
    above = (2 * p * r + C1) * (2 * (filtered(x * y) - p * r) + C2)
    return above / ((p * p + r * r + C1) * (filtered(x * x) - p * p + filtered(y * y) - r * r + C2))


SWEEP = [{"P": 48, "H": 256, "W": 256, "K": 11}, {"P": 9, "H": 301, "W": 199, "K": 7}]
SWEEP_CPU = [{"P": 2, "H": 13, "W": 17, "K": 5}, {"P": 3, "H": 8, "W": 21, "K": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    P, H, W, K = (dims[name] for name in ("P", "H", "W", "K"))
    y = torch.rand(P, H, W, device=device, dtype=dtype)
    x = 0.8 * y + 0.2 * torch.rand(P, H, W, device=device, dtype=dtype)
    g = torch.exp(-(((torch.arange(K, device=device) - (K - 1) / 2) / 1.5) ** 2) / 2)
    return x, y, (g / g.sum()).to(dtype)


# ---- backward ----


@triton.jit
def window_kernel(x_ptr, y_ptr, g_ptr, ds_ptr, map_ptr, total, H, W, K, c1, c2, BLOCK: tl.constexpr):
    plane = tl.program_id(1).to(tl.int64)
    rows, cols = H - K + 1, W - K + 1
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = w < rows * cols
    image = plane * H * W
    p, r, X, Q, C = moments(x_ptr + image, y_ptr + image, g_ptr, w // cols, w % cols, mask, W, K, BLOCK)
    N1, N2, D1, D2 = factors(p, r, X, Q, C, c1, c2)
    S, both = N1 * N2 / (D1 * D2), D1 * D2
    place = plane * rows * cols + w
    ds = tl.load(ds_ptr + place, mask=mask, other=0.0)
    A = 2 * r * (N2 - N1) / both - 2 * S * p * (1 / D1 - 1 / D2)
    tl.store(map_ptr + place, ds * A, mask=mask)
    tl.store(map_ptr + total + place, -ds * S / D2, mask=mask)
    tl.store(map_ptr + 2 * total + place, ds * 2 * N1 / both, mask=mask)


@triton.jit
def pixel_kernel(x_ptr, y_ptr, g_ptr, map_ptr, dx_ptr, total, H, W, K, BLOCK: tl.constexpr):
    plane = tl.program_id(1).to(tl.int64)
    rows, cols = H - K + 1, W - K + 1
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = u < H * W
    A = tl.zeros([BLOCK], dtype=tl.float32)
    B = tl.zeros([BLOCK], dtype=tl.float32)
    F = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(K * K):
        a, b = tap // K, tap % K
        g = tl.load(g_ptr + a) * tl.load(g_ptr + b)
        row, col = u // W - a, u % W - b
        inside = mask & (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
        place = map_ptr + plane * rows * cols + row * cols + col
        A += g * tl.load(place, mask=inside, other=0.0)
        B += g * tl.load(place + total, mask=inside, other=0.0)
        F += g * tl.load(place + 2 * total, mask=inside, other=0.0)
    x = tl.load(x_ptr + plane * H * W + u, mask=mask, other=0.0)
    y = tl.load(y_ptr + plane * H * W + u, mask=mask, other=0.0)
    tl.store(dx_ptr + plane * H * W + u, A + 2 * x * B + y * F, mask=mask)


class SSIM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, g):
        x, y, g = x.contiguous(), y.contiguous(), g.contiguous()
        ctx.save_for_backward(x, y, g)
        return ssim(x, y, g)

    @staticmethod
    def backward(ctx, ds):
        x, y, g = ctx.saved_tensors
        P, H, W, K = sizes(x, y, g)
        ds, dx = ds.contiguous(), torch.empty_like(x)
        maps = torch.empty((3, *ds.shape), device=x.device, dtype=torch.float32)
        grid = (triton.cdiv(ds[0].numel(), 256), P)
        window_kernel[grid](x, y, g, ds, maps, ds.numel(), H, W, K, C1, C2, BLOCK=256)
        pixel_kernel[(triton.cdiv(H * W, 256), P)](x, y, g, maps, dx, ds.numel(), H, W, K, BLOCK=256)
        return dx, None, None


def ssim_autograd(x, y, g):
    return SSIM.apply(x, y, g)
