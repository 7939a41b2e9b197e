"""Affine warp of an image by a learned 2 x 3 matrix, bilinear and zero outside: a spatial transformer.

Forward    pixel (i, j) of the output has the coordinates X = (2j + 1) / W - 1, Y = (2i + 1) / H - 1, reads at
           gx = a X + b Y + c,  gy = d X + e Y + f,  u = ((gx + 1) W - 1) / 2,  v = ((gy + 1) H - 1) / 2,
           y = sum over the four pixels q around (u, v) of wt_q x_q, and x_q = 0 outside
Backward   dx_q += wt_q dy;  with l = u - floor u, k = v - floor v, sums over the channels:
           du = sum dy ((1 - k) (x01 - x00) + k (x11 - x10)),
           dv = sum dy ((1 - l) (x10 - x00) + l (x11 - x01));
           (da, db, dc) = W / 2 sum over pixels of du (X, Y, 1),  (dd, de, df) = H / 2 sum of dv (X, Y, 1)

Forward schedule: a program owns a tile of output pixels of one image, makes their places from six numbers,
and walks the channels. There is no grid of coordinates in memory.
Backward schedule: the same owner makes the places again and walks the channels once: atomic adds of wt_q dy,
as neighbouring places share pixels in a way that is data, and du and dv in registers. No gradient of a grid
is stored either, where a sampling layer behind an affine layer would write and read two numbers a pixel: the
program multiplies du and dv with X, Y and 1 at once and reduces them to six numbers. A small kernel adds
those of an image's tiles.

op: affine_sample
schedule: atomic_accumulate, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def axis_place(theta, X, Y, size):
    """First pixel and weight of the second along one axis; far outside is cut, as nothing is read there."""
    g = tl.load(theta) * X + tl.load(theta + 1) * Y + tl.load(theta + 2)
    u = tl.minimum(tl.maximum(((g + 1) * size - 1) / 2, -2.0), size + 1.0)
    first = tl.floor(u)
    return first.to(tl.int32), u - first


@triton.jit
def coordinates(p, H, W):
    X = (2 * (p % W) + 1).to(tl.float32) / W - 1
    Y = (2 * (p // W) + 1).to(tl.float32) / H - 1
    return X, Y


@triton.jit
def corner(plane, i, j, H, W, mask):
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    return tl.load(plane + i * W + j, mask=inside, other=0.0)


@triton.jit
def affine_sample_kernel(x_ptr, theta_ptr, y_ptr, C, H, W, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < H * W
    X, Y = coordinates(p, H, W)
    j, right = axis_place(theta_ptr + n * 6, X, Y, W)
    i, low = axis_place(theta_ptr + n * 6 + 3, X, Y, H)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        x0 = (1 - right) * corner(plane, i, j, H, W, mask) + right * corner(plane, i, j + 1, H, W, mask)
        x1 = (1 - right) * corner(plane, i + 1, j, H, W, mask) + right * corner(
            plane, i + 1, j + 1, H, W, mask
        )
        tl.store(y_ptr + (n * C + c) * H * W + p, (1 - low) * x0 + low * x1, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def affine_sample(x, theta):
    """x: (N, C, H, W) float32; theta: (N, 2, 3) float32, in coordinates from -1 to 1, x before y."""
    x, (N, C, H, W) = x.contiguous(), x.shape
    y = torch.empty_like(x)
    grid = (N, triton.cdiv(H * W, BLOCK))
    affine_sample_kernel[grid](x, theta.contiguous(), y, C, H, W, BLOCK=BLOCK)
    return y


def reference(x, theta):
    grid = torch.nn.functional.affine_grid(theta, x.shape, align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, align_corners=False)


SWEEP = [{"N": 16, "C": 64, "H": 112, "W": 112}, {"N": 5, "C": 19, "H": 255, "W": 130}]
SWEEP_CPU = [{"N": 2, "C": 3, "H": 9, "W": 10}, {"N": 1, "C": 2, "H": 14, "W": 11}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """A turn, a stretch and a shift; some places are outside. In pixels the matrix has sixteenths and the
    shift odd sixty-fourths: no place is within rounding of a pixel, where the gradient of theta jumps."""
    N, H, W = dims["N"], max(1, dims["H"]), max(1, dims["W"])
    x = torch.randn(N, dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    angle = 0.5 + 0.3 * torch.randn(N, device=device)
    stretch = 0.8 + 0.3 * torch.rand(N, device=device)
    c, s = (((stretch * turn).mul(16).round() / 16) for turn in (angle.cos(), angle.sin()))
    by, down = (((0.1 * size * torch.randn(N, device=device)).mul(32).round() + 0.5) / 32 for size in (W, H))
    theta = torch.stack([c, -s * H / W, 2 * by / W, s * W / H, c, 2 * down / H], dim=1)
    return x, theta.reshape(N, 2, 3).to(dtype)


# ---- backward ----


@triton.jit
def add_corner(plane, i, j, value, H, W, mask):
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    tl.atomic_add(plane + i * W + j, value, mask=inside, sem="relaxed")


@triton.jit
def affine_sample_backward_kernel(
    x_ptr, theta_ptr, dy_ptr, dx_ptr, part_ptr, C, H, W, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < H * W
    X, Y = coordinates(p, H, W)
    j, right = axis_place(theta_ptr + n * 6, X, Y, W)
    i, low = axis_place(theta_ptr + n * 6 + 3, X, Y, H)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        x00 = corner(plane, i, j, H, W, mask)
        x01 = corner(plane, i, j + 1, H, W, mask)
        x10 = corner(plane, i + 1, j, H, W, mask)
        x11 = corner(plane, i + 1, j + 1, H, W, mask)
        dy = tl.load(dy_ptr + (n * C + c) * H * W + p, mask=mask, other=0.0)
        du += dy * ((1 - low) * (x01 - x00) + low * (x11 - x10))
        dv += dy * ((1 - right) * (x10 - x00) + right * (x11 - x01))
        dplane = dx_ptr + (n * C + c) * H * W
        add_corner(dplane, i, j, dy * (1 - low) * (1 - right), H, W, mask)
        add_corner(dplane, i, j + 1, dy * (1 - low) * right, H, W, mask)
        add_corner(dplane, i + 1, j, dy * low * (1 - right), H, W, mask)
        add_corner(dplane, i + 1, j + 1, dy * low * right, H, W, mask)
    part = part_ptr + (n * tl.num_programs(1) + tl.program_id(1)) * 6
    tl.store(part, tl.sum(du * X, axis=0))
    tl.store(part + 1, tl.sum(du * Y, axis=0))
    tl.store(part + 2, tl.sum(du, axis=0))
    tl.store(part + 3, tl.sum(dv * X, axis=0))
    tl.store(part + 4, tl.sum(dv * Y, axis=0))
    tl.store(part + 5, tl.sum(dv, axis=0))


@triton.jit
def theta_sum_kernel(part_ptr, dtheta_ptr, tiles, H, W, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(part_ptr + (n * tiles + i) * 6 + entry, mask=i < tiles, other=0.0)
    pixels = tl.where(entry < 3, W, H)  # du and dv are in pixels, theta in halves of the image
    tl.store(dtheta_ptr + n * 6 + entry, tl.sum(acc, axis=0) * pixels * 0.5)


class AffineSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, theta):
        x, theta = x.contiguous(), theta.contiguous()
        ctx.save_for_backward(x, theta)
        return affine_sample(x, theta)

    @staticmethod
    def backward(ctx, dy):
        x, theta = ctx.saved_tensors
        (N, C, H, W), needs = x.shape, ctx.needs_input_grad
        tiles = triton.cdiv(H * W, BLOCK)
        dx = torch.zeros_like(x)
        part = torch.empty((N, tiles, 6), device=x.device, dtype=torch.float32)
        affine_sample_backward_kernel[(N, tiles)](x, theta, dy.contiguous(), dx, part, C, H, W, BLOCK=BLOCK)
        dtheta = None
        if needs[1]:
            dtheta = torch.empty_like(theta)
            theta_sum_kernel[(N, 6)](part, dtheta, tiles, H, W, BLOCK=128)
        return dx if needs[0] else None, dtheta


def affine_sample_autograd(x, theta):
    return AffineSample.apply(x, theta)
