"""Cyclic shift and cut in windows: what comes before the attention of a shifted-window transformer.

Forward    y[b, wi, wj, i, j] = x[b, (w wi + i + s) mod H, (w wj + j + s) mod W]
Backward   dx[b, I, J] = dy[b, wi, wj, i, j] with w wi + i = (I - s) mod H, w wj + j = (J - s) mod W

Forward schedule: a program owns a tile of (output positions, channels) and reads each position's row of
channels from where the shift and the cut put it; there is no rolled copy in between.
Backward schedule: the map is one to one, so its adjoint is its inverse, and that has a closed form: the
owner of a tile of input positions computes where each went and reads that row. Every dx is stored once,
without a zero fill, atomics or a saved permutation; both passes move each number once, where roll, view,
permute and copy would move it two times and keep a second copy of the image. Channels are contiguous in
both layouts, so loads and stores coalesce on either side.

op: window_partition
schedule: gather_transpose
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_P": 16, "BLOCK_C": 128}


@triton.jit
def partition_kernel(
    x_ptr, y_ptr, positions, H, W, C, w, s, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    window = o // (w * w)
    row = (window // (W // w) % (H // w) * w + o // w % w + s) % H
    col = (window % (W // w) * w + o % w + s) % W
    p = (o // (H * W) * H + row) * W + col
    mask = (o[:, None] < positions) & (c[None, :] < C)
    x = tl.load(x_ptr + p[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + o[:, None] * C + c[None, :], x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def window_partition(x, w, s):
    """x: (B, H, W, C); w: the side of a window, which divides H and W; s: the shift, from 0 to w - 1.
    Gives (B H W / w^2, w^2, C), windows by rows."""
    x = x.contiguous()
    B, H, W, C = x.shape
    if H % w or W % w:
        raise ValueError(f"windows of {w} do not tile an image of {H} by {W}")
    y = torch.empty((B * (H // w) * (W // w), w * w, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(B * H * W, TILE["BLOCK_P"]), triton.cdiv(C, TILE["BLOCK_C"]))
    partition_kernel[grid](x, y, B * H * W, H, W, C, w, s, **TILE)
    return y


def reference(x, w, s):
    B, H, W, C = x.shape
    rolled = torch.roll(x, (-s, -s), (1, 2)).view(B, H // w, w, W // w, w, C)
    return rolled.transpose(2, 3).reshape(-1, w * w, C)


SWEEP = [
    {"B": 64, "rows": 8, "cols": 8, "w": 7, "s": 3, "C": 96},
    {"B": 9, "rows": 13, "cols": 17, "w": 8, "s": 4, "C": 181},
]
SWEEP_CPU = [
    {"B": 2, "rows": 2, "cols": 3, "w": 4, "s": 2, "C": 9},
    {"B": 1, "rows": 3, "cols": 2, "w": 3, "s": 1, "C": 130},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    H, W = dims["rows"] * dims["w"], dims["cols"] * dims["w"]
    return torch.randn(dims["B"], H, W, dims["C"], device=device, dtype=dtype), dims["w"], dims["s"]


# ---- backward ----


@triton.jit
def merge_kernel(
    dy_ptr, dx_ptr, positions, H, W, C, w, s, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = (p // W % H + H - s % H) % H  # the shift undone
    j = (p % W + W - s % W) % W
    window = (p // (H * W) * (H // w) + i // w) * (W // w) + j // w
    o = (window * w + i % w) * w + j % w
    mask = (p[:, None] < positions) & (c[None, :] < C)
    dy = tl.load(dy_ptr + o[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(dx_ptr + p[:, None] * C + c[None, :], dy, mask=mask)


class WindowPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, s):
        ctx.x_shape, ctx.w, ctx.s = x.shape, w, s
        return window_partition(x, w, s)

    @staticmethod
    def backward(ctx, dy):
        B, H, W, C = ctx.x_shape
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(B * H * W, TILE["BLOCK_P"]), triton.cdiv(C, TILE["BLOCK_C"]))
        merge_kernel[grid](dy.contiguous(), dx, B * H * W, H, W, C, ctx.w, ctx.s, **TILE)
        return dx, None, None


def window_partition_autograd(x, w, s):
    return WindowPartition.apply(x, w, s)
