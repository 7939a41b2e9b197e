import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def upper_triang(inp, out, scale, sq, sk, BLK: tl.constexpr):
    q = tl.program_id(0)
    z = tl.program_id(1)
    k = tl.arange(0, BLK)
    at = (z * sq + q) * sk + k
    s = tl.load(inp + at, mask=k <= q, other=-float("inf")).to(tl.float32) * scale
    e = tl.exp(s - tl.max(s, 0))
    e = tl.where(k <= q, e, 0.0)
    tl.store(out + at, e / tl.sum(e, 0), mask=k < sk)


@autodiff(inputs_require_grad=(0,))
def scaled_upper_triang_masked_softmax(x, scale=1.0):
    B, S, T = x.shape
    out = torch.empty_like(x)
    upper_triang[(S, B)](x, out, scale, S, T, BLK=triton.next_power_of_2(T))
    return out
