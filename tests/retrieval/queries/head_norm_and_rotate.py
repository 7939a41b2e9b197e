import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def qk_prepare(x, w, cos, sin, y, H, T, eps, HALF: tl.constexpr):
    n = tl.program_id(0)
    t = (n // H) % T
    k = tl.arange(0, HALF)
    a = tl.load(x + n * 2 * HALF + k).to(tl.float32)
    b = tl.load(x + n * 2 * HALF + HALF + k).to(tl.float32)
    r = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
    a = a * r * tl.load(w + k)
    b = b * r * tl.load(w + HALF + k)
    c = tl.load(cos + t * HALF + k)
    s = tl.load(sin + t * HALF + k)
    tl.store(y + n * 2 * HALF + k, a * c - b * s)
    tl.store(y + n * 2 * HALF + HALF + k, a * s + b * c)


@autodiff(inputs_require_grad=(0, 1))
def norm_rope(x, w, cos, sin, eps=1e-6):
    B, T, H, D = x.shape
    y = torch.empty_like(x)
    qk_prepare[(B * T * H,)](x, w, cos, sin, y, H, T, eps, HALF=D // 2)
    return y
