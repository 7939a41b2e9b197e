import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def disparity_volume(left, right, cost, C, H, W, MAXD, BX: tl.constexpr):
    b, y, d = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    for x0 in range(0, W, BX):
        x = x0 + tl.arange(0, BX)
        ok = (x < W) & (x >= d)
        acc = tl.zeros((BX,), tl.float32)
        for c in range(C):
            row = ((b * C + c) * H + y) * W
            acc += tl.load(left + row + x, mask=ok, other=0.0) * tl.load(
                right + row + x - d, mask=ok, other=0.0
            )
        tl.store(cost + ((b * MAXD + d) * H + y) * W + x, acc / C, mask=x < W)


@autodiff(inputs_require_grad=(0, 1))
def cost_volume(left, right, max_disparity=48):
    B, C, H, W = left.shape
    cost = left.new_empty(B, max_disparity, H, W)
    disparity_volume[(B * H, max_disparity)](left, right, cost, C, H, W, max_disparity, BX=128)
    return cost
