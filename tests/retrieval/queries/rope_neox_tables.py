import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rotary(x, cos, sin, o, T, H, HALF: tl.constexpr, BH: tl.constexpr):
    t = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    f = tl.arange(0, HALF)
    ok = (h < H)[:, None]
    c = tl.load(cos + t % T * HALF + f)[None, :]
    s = tl.load(sin + t % T * HALF + f)[None, :]
    p = (t * H + h)[:, None] * 2 * HALF + f[None, :]
    a = tl.load(x + p, mask=ok, other=0.0)
    b = tl.load(x + p + HALF, mask=ok, other=0.0)
    tl.store(o + p, a * c - b * s, mask=ok)
    tl.store(o + p + HALF, b * c + a * s, mask=ok)


@autodiff(inputs_require_grad=(0,))
def apply_rotary(x, cos, sin):
    B, T, H, D = x.shape
    o = torch.empty_like(x)
    rotary[(B * T, triton.cdiv(H, 8))](x, cos, sin, o, T, H, HALF=D // 2, BH=8)
    return o
