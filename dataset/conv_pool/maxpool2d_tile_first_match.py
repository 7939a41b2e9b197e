"""Maximum pooling over windows that do not overlap, k by k with stride k, without saved indices.

Forward    y_o = max of x over the window of o; rows and columns that fill no window are left out
Backward   dx_p = dy_o for the first pixel p of o's window with x_p = y_o, and 0 for all others

Forward schedule: a program owns a flat tile of windows and walks the k k pixels of each.
Backward schedule: a pixel is in one window, so the window's owner may write all of its pixels. It reads the
window and y again and routes dy to the first pixel equal to the maximum; a flag in a register says whether it
was met. Indices would take a byte or more an output to store and to load; x is saved by whoever made it
anyway. y was copied from x, not computed, so equality is exact in every dtype. The grid has ceil(H / k) times
ceil(W / k) windows: those beyond the last whole one write the zeros of what is left out, and no buffer is
filled first.

op: max_pool2d
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def max_pool_kernel(x_ptr, y_ptr, n_out, H, W, OH, OW, k, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = x_ptr + (o // (OH * OW) * H + o // OW % OH * k) * W + o % OW * k
    best = tl.load(corner, mask=o < n_out, other=0.0)
    for tap in range(1, k * k):
        x = tl.load(corner + tap // k * W + tap % k, mask=o < n_out, other=0.0)
        best = tl.where(x > best, x, best)
    tl.store(y_ptr + o, best, mask=o < n_out)


@autodiff(inputs_require_grad=(0,))
def max_pool2d(x, k):
    """x: (N, C, H, W); gives (N, C, H // k, W // k)."""
    x, (N, C, H, W) = x.contiguous(), x.shape
    y = torch.empty((N, C, H // k, W // k), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(y.numel(), BLOCK),)
    max_pool_kernel[grid](x, y, y.numel(), H, W, H // k, W // k, k, BLOCK=BLOCK)
    return y


def reference(x, k):
    return torch.nn.functional.max_pool2d(x, k)


SWEEP = [
    {"N": 32, "C": 64, "H": 112, "W": 112, "k": 2},
    {"N": 7, "C": 131, "H": 75, "W": 100, "k": 3},
]
SWEEP_CPU = [{"N": 2, "C": 3, "H": 10, "W": 15, "k": 2}, {"N": 1, "C": 2, "H": 8, "W": 10, "k": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    H, W = dims["H"], dims["W"]
    x = torch.randn(dims["N"], dims["C"], H, W, device=device, dtype=dtype)
    return x, max(1, min(dims["k"], H, W))


# ---- backward ----


@triton.jit
def max_pool_backward_kernel(
    x_ptr, y_ptr, dy_ptr, dx_ptr, windows, H, W, OH, OW, k, BLOCK: tl.constexpr
):  # fmt: skip
    """windows: with those that are cut off below and at the right."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    high, wide = tl.cdiv(H, k), tl.cdiv(W, k)
    plane, oy, ox = o // (high * wide), o // wide % high, o % wide
    whole = (o < windows) & (oy < OH) & (ox < OW)
    y = tl.load(y_ptr + (plane * OH + oy) * OW + ox, mask=whole, other=0.0)
    dy = tl.load(dy_ptr + (plane * OH + oy) * OW + ox, mask=whole, other=0.0)
    met = o < 0
    for tap in range(k * k):
        i, j = oy * k + tap // k, ox * k + tap % k
        mask = (o < windows) & (i < H) & (j < W)
        x = tl.load(x_ptr + (plane * H + i) * W + j, mask=mask, other=0.0)
        first = whole & (x == y) & (met == 0)
        met = met | first
        tl.store(dx_ptr + (plane * H + i) * W + j, tl.where(first, dy, 0.0), mask=mask)


class MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        x = x.contiguous()
        y = max_pool2d(x, k)
        ctx.save_for_backward(x, y)
        ctx.k = k
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        (N, C, H, W), (OH, OW), k = x.shape, y.shape[2:], ctx.k
        dx = torch.empty_like(x)
        windows = N * C * triton.cdiv(H, k) * triton.cdiv(W, k)
        max_pool_backward_kernel[(triton.cdiv(windows, BLOCK),)](
            x, y, dy.contiguous(), dx, windows, H, W, OH, OW, k, BLOCK=BLOCK
        )
        return dx, None


def max_pool2d_autograd(x, k):
    return MaxPool2d.apply(x, k)
