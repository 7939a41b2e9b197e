"""Bilinear samples of an image at given places, zero outside: spatial transformers, warping by a flow.

Forward    a place (gx, gy) in [-1, 1] is u = ((gx + 1) W - 1) / 2, v = ((gy + 1) H - 1) / 2 in pixels;
           j = floor u, i = floor v, a = u - j, b = v - i, and for each channel
           y = (1 - b) ((1 - a) x00 + a x01) + b ((1 - a) x10 + a x11),  x01 = x[i, j + 1] or 0 outside
Backward   dx at the four corners += dy times their weights;
           du = sum_c dy ((1 - b) (x01 - x00) + b (x11 - x10)),  dgx = du W / 2,
           dv = sum_c dy ((1 - a) (x10 - x00) + a (x11 - x01)),  dgy = dv H / 2

Forward schedule: a program owns a tile of output pixels of one image and walks the channels, with corners
and weights, the same for all, in registers.
Backward schedule: the same owner and walk. Which pixel of x a sample touches is data, and neighbours share
corners, but a corner seldom gets more than a few samples: so dx goes by atomic adds into a zeroed fp32
buffer, where sorting samples by corner would cost more than it saves. The corner values that dgrid needs are
read in the same walk, and its sum over channels stays in two registers a sample, stored once.

op: grid_sample
schedule: atomic_accumulate, row_reduce_correct
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def place(grid_ptr, sample, mask, size, axis: tl.constexpr):
    """First corner and weight of the second along an axis; far outside all corners are, so it may be cut."""
    g = tl.load(grid_ptr + sample * 2 + axis, mask=mask, other=0.0).to(tl.float32)
    u = tl.minimum(tl.maximum(((g + 1) * size - 1) / 2, -2.0), size + 1.0)
    first = tl.floor(u)
    return first.to(tl.int32), u - first


@triton.jit
def corner(plane, i, j, H, W, mask):
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    return tl.load(plane + i * W + j, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def grid_sample_kernel(x_ptr, grid_ptr, y_ptr, C, H, W, P, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    j, a = place(grid_ptr, n * P + p, mask, W, 0)
    i, b = place(grid_ptr, n * P + p, mask, H, 1)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        top = (1 - a) * corner(plane, i, j, H, W, mask) + a * corner(plane, i, j + 1, H, W, mask)
        low = (1 - a) * corner(plane, i + 1, j, H, W, mask) + a * corner(plane, i + 1, j + 1, H, W, mask)
        y = (1 - b) * top + b * low
        tl.store(y_ptr + (n * C + c) * P + p, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def grid_sample(x, grid):
    """x: (N, C, H, W); grid: (N, Y, X, 2), x before y; gives (N, C, Y, X)."""
    x, grid = x.contiguous(), grid.contiguous()
    N, C, H, W = x.shape
    _, Y, X, _ = grid.shape
    y = torch.empty((N, C, Y, X), device=x.device, dtype=x.dtype)
    grid_sample_kernel[(N, triton.cdiv(Y * X, 128))](x, grid, y, C, H, W, Y * X, BLOCK=128)
    return y


def reference(x, grid):
    return torch.nn.functional.grid_sample(x, grid, align_corners=False)


SWEEP = [
    {"N": 8, "C": 64, "H": 128, "W": 128, "Y": 128, "X": 128},
    {"N": 3, "C": 19, "H": 255, "W": 130, "Y": 201, "X": 333},
]
SWEEP_CPU = [
    {"N": 1, "C": 4, "H": 8, "W": 9, "Y": 6, "X": 11},
    {"N": 2, "C": 3, "H": 5, "W": 4, "Y": 12, "X": 12},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Places up to a pixel outside, none of them close to a pixel's centre, where du jumps."""
    N, H, W, Y, X = (dims[name] for name in "NHWYX")
    x = torch.randn(N, dims["C"], H, W, device=device, dtype=dtype)
    axes = []
    for size in (W, H):
        first = torch.randint(-2, size + 1, (N, Y, X), device=device)
        u = first + 0.1 + 0.8 * torch.rand(N, Y, X, device=device)
        axes.append((2 * u + 1) / size - 1)
    return x, torch.stack(axes, dim=-1).to(dtype)


# ---- backward ----


@triton.jit
def add_corner(plane, i, j, value, H, W, mask):
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    tl.atomic_add(plane + i * W + j, value, mask=inside, sem="relaxed")


@triton.jit
def grid_sample_backward_kernel(
    x_ptr, grid_ptr, dy_ptr, dx_ptr, dgrid_ptr, C, H, W, P, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    j, a = place(grid_ptr, n * P + p, mask, W, 0)
    i, b = place(grid_ptr, n * P + p, mask, H, 1)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        x00 = corner(plane, i, j, H, W, mask)
        x01 = corner(plane, i, j + 1, H, W, mask)
        x10 = corner(plane, i + 1, j, H, W, mask)
        x11 = corner(plane, i + 1, j + 1, H, W, mask)
        dy = tl.load(dy_ptr + (n * C + c) * P + p, mask=mask, other=0.0).to(tl.float32)
        du += dy * ((1 - b) * (x01 - x00) + b * (x11 - x10))
        dv += dy * ((1 - a) * (x10 - x00) + a * (x11 - x01))
        dplane = dx_ptr + (n * C + c) * H * W
        add_corner(dplane, i, j, dy * (1 - b) * (1 - a), H, W, mask)
        add_corner(dplane, i, j + 1, dy * (1 - b) * a, H, W, mask)
        add_corner(dplane, i + 1, j, dy * b * (1 - a), H, W, mask)
        add_corner(dplane, i + 1, j + 1, dy * b * a, H, W, mask)
    own = dgrid_ptr + (n * P + p) * 2
    tl.store(own, du * (W * 0.5), mask=mask)
    tl.store(own + 1, dv * (H * 0.5), mask=mask)


class GridSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grid):
        x, grid = x.contiguous(), grid.contiguous()
        ctx.save_for_backward(x, grid)
        return grid_sample(x, grid)

    @staticmethod
    def backward(ctx, dy):
        x, grid = ctx.saved_tensors
        (N, C, H, W), P = x.shape, grid.shape[1] * grid.shape[2]
        dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        dgrid = torch.empty_like(grid)
        grid_sample_backward_kernel[(N, triton.cdiv(P, 128))](
            x, grid, dy.contiguous(), dx, dgrid, C, H, W, P, BLOCK=128
        )
        needs = ctx.needs_input_grad
        return dx.to(x.dtype) if needs[0] else None, dgrid if needs[1] else None


def grid_sample_autograd(x, grid):
    return GridSample.apply(x, grid)
