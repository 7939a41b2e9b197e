"""RoIAlign, channels last: the mean of S S bilinear samples in each of O O bins of each region.

Forward    region r = (image, x0, y0, x1, y1) times the scale, minus half a pixel, is cut into O bins a side,
           and bin o has S points a side: v = y0 + (o + (s + 1/2) / S) (y1 - y0) / O, and u likewise. A point
           with v in [-1, H] and u in [-1, W] is clamped into the map and read with the weights of its four
           corners; another one counts as 0:   y[r, o, q, c] = (1 / S^2) sum over points and corners of
           wt x[image, corner, c]
Backward   dx[image, corner, c] += wt dy[r, o, q, c] / S^2 for the same points and corners

Forward schedule: a program owns (region, bin, channel tile) and walks its points. A point is four numbers for
the whole tile, and with channels last each corner is one contiguous read.
Backward schedule: the same owner, which reads its dy once and adds a contiguous row to each corner. Regions
are data, overlap where objects are and leave the rest of the map alone, so a pixel's owner would test every
region for nothing nearly always; atomics meet only where regions overlap or neighbouring points share a
corner. A region's place is a constant, as the sampling points are in training: no gradient for it.

op: roi_align
schedule: atomic_accumulate
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def region(roi_ptr, r, scale):
    image = tl.load(roi_ptr + r * 5).to(tl.int64)
    x0 = tl.load(roi_ptr + r * 5 + 1) * scale - 0.5
    y0 = tl.load(roi_ptr + r * 5 + 2) * scale - 0.5
    x1 = tl.load(roi_ptr + r * 5 + 3) * scale - 0.5
    y1 = tl.load(roi_ptr + r * 5 + 4) * scale - 0.5
    return image, x0, y0, x1 - x0, y1 - y0


@triton.jit
def corners(v, size):
    """First corner, second corner, weight of the second, and whether v counts, along an axis."""
    counts = (v >= -1) & (v <= size)
    v = tl.minimum(tl.maximum(v, 0.0), size - 1.0)
    first = tl.floor(v)
    i = first.to(tl.int64)
    return i, tl.minimum(i + 1, size - 1), v - first, counts


@triton.jit
def roi_align_kernel(x_ptr, roi_ptr, y_ptr, C, H, W, O, scale, S: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    bin = tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    image, x0, y0, width, height = region(roi_ptr, r, scale)
    plane = x_ptr + image * H * W * C + c
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for point in range(S * S):
        v = y0 + (bin // O + (point // S + 0.5) / S) * height / O
        u = x0 + (bin % O + (point % S + 0.5) / S) * width / O
        i0, i1, b, v_counts = corners(v, H)
        j0, j1, a, u_counts = corners(u, W)
        if v_counts & u_counts:
            x00 = tl.load(plane + (i0 * W + j0) * C, mask=c < C, other=0.0).to(tl.float32)
            x01 = tl.load(plane + (i0 * W + j1) * C, mask=c < C, other=0.0).to(tl.float32)
            x10 = tl.load(plane + (i1 * W + j0) * C, mask=c < C, other=0.0).to(tl.float32)
            x11 = tl.load(plane + (i1 * W + j1) * C, mask=c < C, other=0.0).to(tl.float32)
            y += (1 - b) * ((1 - a) * x00 + a * x01) + b * ((1 - a) * x10 + a * x11)
    tl.store(y_ptr + (r * O * O + bin) * C + c, (y / (S * S)).to(y_ptr.dtype.element_ty), mask=c < C)


@autodiff(inputs_require_grad=(0,))
def roi_align(x, rois, O, scale=1.0, S=2):
    """x: (N, H, W, C); rois: float32 (R, 5), image and two corners in pixels of the picture, of which the map
    is `scale` times as large; gives (R, O, O, C)."""
    x = x.contiguous()
    _, H, W, C = x.shape
    y = torch.empty((rois.shape[0], O, O, C), device=x.device, dtype=x.dtype)
    grid = (rois.shape[0], O * O, triton.cdiv(C, 128))
    roi_align_kernel[grid](x, rois.contiguous(), y, C, H, W, O, scale, S=S, BLOCK=128)
    return y


def reference(x, rois, O, scale=1.0, S=2):
    _, H, W, _ = x.shape
    box = rois[:, 1:].to(x.dtype) * scale - 0.5
    step = (torch.arange(O * S, device=x.device, dtype=x.dtype) + 0.5) / (O * S)

    def axis(low, high, size):
        v = low[:, None] + step * (high - low)[:, None]
        counts = (v >= -1) & (v <= size)
        v = v.clamp(0, size - 1)
        i = v.floor().long()
        return i, (i + 1).clamp(max=size - 1), v - i, counts

    i0, i1, b, v_counts = axis(box[:, 1], box[:, 3], H)
    j0, j1, a, u_counts = axis(box[:, 0], box[:, 2], W)
    a, b = a[:, None, :, None], b[:, :, None, None]
    image = rois[:, 0].long()[:, None, None]

    def corner(i, j):
        return x[image, i[:, :, None], j[:, None, :]]

    y = (1 - b) * ((1 - a) * corner(i0, j0) + a * corner(i0, j1))
    y = y + b * ((1 - a) * corner(i1, j0) + a * corner(i1, j1))
    y = y * (v_counts[:, :, None] & u_counts[:, None, :])[..., None]
    return y.unflatten(1, (O, S)).unflatten(3, (O, S)).mean(dim=(2, 4))


SWEEP = [
    {"N": 2, "H": 200, "W": 272, "C": 256, "R": 1024, "O": 7},
    {"N": 3, "H": 50, "W": 67, "C": 200, "R": 301, "O": 14},
]
SWEEP_CPU = [
    {"N": 2, "H": 10, "W": 12, "C": 6, "R": 4, "O": 3},
    {"N": 1, "H": 7, "W": 5, "C": 130, "R": 3, "O": 2},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Regions of a picture four times as large as the map, some of them reaching out of it."""
    N, H, W, R = dims["N"], dims["H"], dims["W"], dims["R"]
    x = torch.randn(N, H, W, dims["C"], device=device, dtype=dtype)
    image = torch.randint(0, max(1, N), (R, 1), device=device).float()
    size = torch.tensor([W, H], device=device) * 4.0
    corner = (torch.rand(R, 2, device=device) - 0.1) * size
    extent = torch.rand(R, 2, device=device) * size / 2
    return x, torch.cat([image, corner, corner + extent], dim=1), dims["O"], 0.25


# ---- backward ----


@triton.jit
def roi_align_backward_kernel(
    dy_ptr, roi_ptr, dx_ptr, C, H, W, O, scale, S: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    bin = tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    image, x0, y0, width, height = region(roi_ptr, r, scale)
    plane = dx_ptr + image * H * W * C + c
    dy = tl.load(dy_ptr + (r * O * O + bin) * C + c, mask=c < C, other=0.0).to(tl.float32) / (S * S)
    for point in range(S * S):
        v = y0 + (bin // O + (point // S + 0.5) / S) * height / O
        u = x0 + (bin % O + (point % S + 0.5) / S) * width / O
        i0, i1, b, v_counts = corners(v, H)
        j0, j1, a, u_counts = corners(u, W)
        if v_counts & u_counts:
            tl.atomic_add(plane + (i0 * W + j0) * C, (1 - b) * (1 - a) * dy, mask=c < C, sem="relaxed")
            tl.atomic_add(plane + (i0 * W + j1) * C, (1 - b) * a * dy, mask=c < C, sem="relaxed")
            tl.atomic_add(plane + (i1 * W + j0) * C, b * (1 - a) * dy, mask=c < C, sem="relaxed")
            tl.atomic_add(plane + (i1 * W + j1) * C, b * a * dy, mask=c < C, sem="relaxed")


class RoIAlign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rois, O, scale, S):
        rois = rois.contiguous()
        ctx.save_for_backward(rois)
        ctx.x_shape, ctx.options = x.shape, (O, scale, S)
        return roi_align(x, rois, O, scale, S)

    @staticmethod
    def backward(ctx, dy):
        (rois,) = ctx.saved_tensors
        (_, H, W, C), (O, scale, S) = ctx.x_shape, ctx.options
        dx = torch.zeros(ctx.x_shape, device=dy.device, dtype=torch.float32)
        grid = (rois.shape[0], O * O, triton.cdiv(C, 128))
        roi_align_backward_kernel[grid](dy.contiguous(), rois, dx, C, H, W, O, scale, S=S, BLOCK=128)
        return dx.to(dy.dtype), None, None, None, None


def roi_align_autograd(x, rois, O, scale=1.0, S=2):
    return RoIAlign.apply(x, rois, O, scale, S)
