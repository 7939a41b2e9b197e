"""Involution: every pixel has a filter of its own, made by a network, shared by the channels of a group.

Forward    y[n, c, p] = sum over taps (r, q) of a[n, g, (r, q), p] x[n, c, p + (r, q) - pad],  g the group of
           c, R odd, pad = (R - 1) / 2, x = 0 outside
Backward   da[n, g, (r, q), p] = sum over the channels c of g of dy[n, c, p] x[n, c, p + (r, q) - pad];
           dx[n, c, i] = sum over taps of a[n, g, (r, q), i - (r, q) + pad] dy[n, c, i - (r, q) + pad]

Forward schedule: a program owns (image and group, tile of pixels) and walks the taps; a tap's filter values
are one load for all channels of the group, a tile of which is walked inside.
Backward schedule: da is a sum over channels, and the same owner makes it: for a tap it walks the group's
channels and stores one number a pixel. In dx the roles change: the pixel that is read is the owner and asks
each of the R R pixels around it for the tap that looked here, (r, q) seen from the other side; the filter is
no longer its own, so its values are gathered from the neighbours' planes, and from cache, as all channels of
the group use them. Both are gathers and one pass over the taps; nothing of size R R C P is made.

op: involution
schedule: gather_transpose, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_C": 8, "BLOCK_P": 128}


@triton.jit
def moved(p, tap, R, H, W):
    """The pixel that a tap of p reads, and whether there is one."""
    i, j = p // W + tap // R - R // 2, p % W + tap % R - R // 2
    return i * W + j, (p < H * W) & (i >= 0) & (i < H) & (j >= 0) & (j < W)


@triton.jit
def load_channels(ptr, first, c, p, inside, width, P):
    """A tile of channels by pixels of one group, whose first channel's plane is `first`."""
    mask = (c[:, None] < width) & inside[None, :]
    return tl.load(ptr + (first + c[:, None]) * P + p[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def involution_kernel(x_ptr, a_ptr, y_ptr, width, H, W, R, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)  # image and group
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    P = H * W
    y = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for tap in range(R * R):
        a = tl.load(a_ptr + (group * R * R + tap) * P + p, mask=p < P, other=0.0).to(tl.float32)
        q, inside = moved(p, tap, R, H, W)
        y += a[None, :] * load_channels(x_ptr, group * width, c, q, inside, width, P)
    mask = (c[:, None] < width) & (p[None, :] < P)
    offs = (group * width + c[:, None]) * P + p[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def involution(x, a):
    """x: (N, C, H, W); a: (N, G, R, R, H, W), G a divisor of C, R odd."""
    (N, C, H, W), (G, R) = x.shape, a.shape[1:3]
    if R % 2 == 0 or C % max(1, G) or a.shape != (N, G, R, R, H, W):
        raise ValueError(f"filters {tuple(a.shape)} are not for {tuple(x.shape)}")
    y, width = torch.empty((N, C, H, W), device=x.device, dtype=x.dtype), C // max(1, G)
    grid = (N * G, triton.cdiv(H * W, TILE["BLOCK_P"]), triton.cdiv(width, TILE["BLOCK_C"]))
    involution_kernel[grid](x.contiguous(), a.contiguous(), y, width, H, W, R, **TILE)
    return y


def reference(x, a):
    (N, C, H, W), (G, R) = x.shape, a.shape[1:3]
    patches = torch.nn.functional.unfold(x, R, padding=R // 2)
    patches = patches.view(N, G, C // max(1, G), R * R, H, W)
    return (patches * a.view(N, G, 1, R * R, H, W)).sum(3).view(N, C, H, W)


SWEEP = [
    {"N": 16, "H": 56, "W": 56, "G": 4, "width": 16, "R": 7},
    {"N": 3, "H": 45, "W": 61, "G": 7, "width": 10, "R": 5},
]
SWEEP_CPU = [
    {"N": 1, "H": 8, "W": 9, "G": 3, "width": 4, "R": 3},
    {"N": 2, "H": 12, "W": 13, "G": 1, "width": 9, "R": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, H, W, G, R = (dims[name] for name in "NHWGR")
    R = min(R + 1 - R % 2, 7)
    x = torch.randn(N, G * dims["width"], H, W, device=device, dtype=dtype)
    return x, torch.randn(N, G, R, R, H, W, device=device, dtype=dtype) / R


# ---- backward ----


@triton.jit
def filter_grad_kernel(
    x_ptr, dy_ptr, da_ptr, width, H, W, R, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    P = H * W
    for tap in range(R * R):
        q, inside = moved(p, tap, R, H, W)
        products = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
        for start in range(0, width, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            dy = load_channels(dy_ptr, group * width, c, p, p < P, width, P)
            products += dy * load_channels(x_ptr, group * width, c, q, inside, width, P)
        da = tl.sum(products, axis=0).to(da_ptr.dtype.element_ty)
        tl.store(da_ptr + (group * R * R + tap) * P + p, da, mask=p < P)


@triton.jit
def dx_kernel(a_ptr, dy_ptr, dx_ptr, width, H, W, R, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    P = H * W
    dx = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for tap in range(R * R):
        q, inside = moved(p, R * R - 1 - tap, R, H, W)  # its tap reads p
        a = tl.load(a_ptr + (group * R * R + tap) * P + q, mask=inside, other=0.0).to(tl.float32)
        dx += a[None, :] * load_channels(dy_ptr, group * width, c, q, inside, width, P)
    mask = (c[:, None] < width) & (p[None, :] < P)
    offs = (group * width + c[:, None]) * P + p[None, :]
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Involution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        x, a = x.contiguous(), a.contiguous()
        ctx.save_for_backward(x, a)
        return involution(x, a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        (N, C, H, W), (G, R), dy = x.shape, a.shape[1:3], dy.contiguous()
        width, tiles = C // max(1, G), triton.cdiv(H * W, TILE["BLOCK_P"])
        dx = da = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (N * G, tiles, triton.cdiv(width, TILE["BLOCK_C"]))
            dx_kernel[grid](a, dy, dx, width, H, W, R, **TILE)
        if ctx.needs_input_grad[1]:
            da = torch.empty_like(a)
            filter_grad_kernel[(N * G, tiles)](x, dy, da, width, H, W, R, **TILE)
        return dx, da


def involution_autograd(x, a):
    return Involution.apply(x, a)
