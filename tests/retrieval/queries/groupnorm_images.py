import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gn_kernel(x, y, w, b, C, HW, G, eps, BLOCK: tl.constexpr):
    n, g = tl.program_id(0), tl.program_id(1)
    cg = C // G
    size = cg * HW
    start = (n * C + g * cg) * HW
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    for o in range(0, size, BLOCK):
        i = o + tl.arange(0, BLOCK)
        v = tl.load(x + start + i, mask=i < size, other=0.0).to(tl.float32)
        s1 += v
        s2 += v * v
    mu = tl.sum(s1) / size
    var = tl.sum(s2) / size - mu * mu
    inv = tl.rsqrt(var + eps)
    for o in range(0, size, BLOCK):
        i = o + tl.arange(0, BLOCK)
        ok = i < size
        ch = g * cg + i // HW
        v = tl.load(x + start + i, mask=ok, other=0.0).to(tl.float32)
        wc = tl.load(w + ch, mask=ok, other=0.0)
        bc = tl.load(b + ch, mask=ok, other=0.0)
        tl.store(y + start + i, (v - mu) * inv * wc + bc, mask=ok)


@autodiff(inputs_require_grad=(0, 1, 2))
def group_norm(x, w, b, groups=32, eps=1e-5):
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    gn_kernel[(N, groups)](x, y, w, b, C, H * W, groups, eps, BLOCK=1024)
    return y
