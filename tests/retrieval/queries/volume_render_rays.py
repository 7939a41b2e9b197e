import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def render(sigma, rgb, dt, out, R, S, BR: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    ok = r < R
    T = tl.full((BR,), 1.0, tl.float32)
    c0 = tl.zeros((BR,), tl.float32)
    c1 = tl.zeros((BR,), tl.float32)
    c2 = tl.zeros((BR,), tl.float32)
    for s in range(S):
        i = r * S + s
        a = 1.0 - tl.exp(-tl.load(sigma + i, mask=ok, other=0.0) * tl.load(dt + i, mask=ok, other=0.0))
        w = a * T
        c0 += w * tl.load(rgb + 3 * i, mask=ok, other=0.0)
        c1 += w * tl.load(rgb + 3 * i + 1, mask=ok, other=0.0)
        c2 += w * tl.load(rgb + 3 * i + 2, mask=ok, other=0.0)
        T *= 1.0 - a
    tl.store(out + 3 * r, c0, mask=ok)
    tl.store(out + 3 * r + 1, c1, mask=ok)
    tl.store(out + 3 * r + 2, c2, mask=ok)


@autodiff(inputs_require_grad=(0, 1))
def composite(sigma, rgb, dt):
    R, S = sigma.shape
    out = rgb.new_empty(R, 3)
    render[(triton.cdiv(R, 64),)](sigma, rgb, dt, out, R, S, BR=64)
    return out
