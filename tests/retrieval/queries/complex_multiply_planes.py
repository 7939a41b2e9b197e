import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def cmul(ar, ai, br, bi, cr, ci, n, B: tl.constexpr):
    k = tl.program_id(0) * B + tl.arange(0, B)
    m = k < n
    p, q = tl.load(ar + k, mask=m), tl.load(ai + k, mask=m)
    r, s = tl.load(br + k, mask=m), tl.load(bi + k, mask=m)
    tl.store(cr + k, p * r - q * s, mask=m)
    tl.store(ci + k, p * s + q * r, mask=m)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def complex_mul(ar, ai, br, bi):
    cr, ci = torch.empty_like(ar), torch.empty_like(ai)
    cmul[(triton.cdiv(ar.numel(), 512),)](ar, ai, br, bi, cr, ci, ar.numel(), B=512)
    return cr, ci
