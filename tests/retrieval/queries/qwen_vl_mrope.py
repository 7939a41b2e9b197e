import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def mrope(x, cos, sin, y, T, H, HALF: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, BP: tl.constexpr):
    t, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BP)
    ok = i < HALF
    section = tl.where(i < S0, 0, tl.where(i < S0 + S1, 1, 2))
    c = tl.load(cos + (section * T + t) * HALF + i, mask=ok, other=1.0)
    s = tl.load(sin + (section * T + t) * HALF + i, mask=ok, other=0.0)
    base = (t * H + h) * 2 * HALF
    a = tl.load(x + base + i, mask=ok, other=0.0)
    b = tl.load(x + base + HALF + i, mask=ok, other=0.0)
    tl.store(y + base + i, a * c - b * s, mask=ok)
    tl.store(y + base + HALF + i, b * c + a * s, mask=ok)


@autodiff(inputs_require_grad=(0,))
def multimodal_rope(x, cos, sin, sections=(16, 24, 24)):
    T, H, D = x.shape
    y = torch.empty_like(x)
    mrope[(T, H)](x, cos, sin, y, T, H, D // 2, sections[0], sections[1], triton.next_power_of_2(D // 2))
    return y
