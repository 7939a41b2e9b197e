import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def nearest(i, o, n, w, W, hW, HW, f: tl.constexpr, B: tl.constexpr):
    k = tl.program_id(0) * B + tl.arange(0, B)
    m = k < n
    img = k // HW
    y = k % HW // W // f
    x = k % W // f
    tl.store(o + k, tl.load(i + img * hW + y * w + x, mask=m), mask=m)


@autodiff(inputs_require_grad=(0,))
def upscale(i, f=2):
    N, C, h, w = i.shape
    o = i.new_empty(N, C, h * f, w * f)
    nearest[(triton.cdiv(o.numel(), 1024),)](i, o, o.numel(), w, w * f, h * w, h * w * f * f, f, 1024)
    return o
