import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def split_rotate(qkv, cs, sn, out, T, HQ, HKV, HALF: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    total = HQ + 2 * HKV
    k = tl.arange(0, HALF)
    p = (row * total + head) * 2 * HALF + k
    lo = tl.load(qkv + p)
    hi = tl.load(qkv + p + HALF)
    if head < HQ + HKV:
        c = tl.load(cs + row % T * HALF + k)
        s = tl.load(sn + row % T * HALF + k)
        tl.store(out + p, lo * c - hi * s)
        tl.store(out + p + HALF, hi * c + lo * s)
    else:
        tl.store(out + p, lo)
        tl.store(out + p + HALF, hi)


@autodiff(inputs_require_grad=(0,))
def rope_qkv(qkv, cs, sn, hq, hkv):
    B, T, W = qkv.shape
    out = torch.empty_like(qkv)
    split_rotate[(B * T, hq + 2 * hkv)](qkv, cs, sn, out, T, hq, hkv, HALF=W // (hq + 2 * hkv) // 2)
    return out
