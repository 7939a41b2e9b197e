import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def corner(img, yy, xx, H, W, live):
    ok = live & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
    return tl.load(img + yy * W + xx, mask=ok, other=0.0)


@triton.jit
def warp(image, flow, out, C, H, W, B: tl.constexpr):
    n, c = tl.program_id(1) // C, tl.program_id(1) % C
    p = tl.program_id(0) * B + tl.arange(0, B)
    live = p < H * W
    x = (p % W).to(tl.float32) + tl.load(flow + (n * 2) * H * W + p, mask=live, other=0.0)
    y = (p // W).to(tl.float32) + tl.load(flow + (n * 2 + 1) * H * W + p, mask=live, other=0.0)
    x0, y0 = tl.floor(x), tl.floor(y)
    wx, wy = x - x0, y - y0
    ix, iy = x0.to(tl.int32), y0.to(tl.int32)
    src = image + (n * C + c) * H * W
    top = corner(src, iy, ix, H, W, live) * (1 - wx) + corner(src, iy, ix + 1, H, W, live) * wx
    low = corner(src, iy + 1, ix, H, W, live) * (1 - wx) + corner(src, iy + 1, ix + 1, H, W, live) * wx
    tl.store(out + (n * C + c) * H * W + p, top * (1 - wy) + low * wy, mask=live)


@autodiff(inputs_require_grad=(0, 1))
def backward_warp(image, flow):
    N, C, H, W = image.shape
    out = torch.empty_like(image)
    warp[(triton.cdiv(H * W, 256), N * C)](image, flow, out, C, H, W, B=256)
    return out
