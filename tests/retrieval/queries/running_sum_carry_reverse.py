import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def reversed_cumsum(s, o, T, D, BT: tl.constexpr, BD: tl.constexpr):
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    d = i_d * BD + tl.arange(0, BD)
    t = tl.arange(0, BT)
    m = tl.where(t[:, None] <= t[None, :], 1.0, 0.0)
    carry = tl.zeros([BD], dtype=tl.float32)
    for i in range(tl.cdiv(T, BT) - 1, -1, -1):
        r = i * BT + t
        ok = (r < T)[:, None] & (d < D)[None, :]
        b = tl.load(s + (i_b * T + r)[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        c = carry[None, :] + tl.dot(m, b, allow_tf32=False)
        tl.store(o + (i_b * T + r)[:, None] * D + d[None, :], c, mask=ok)
        carry += tl.sum(b, 0)


@autodiff(inputs_require_grad=(0,))
def reverse_cumsum(s):
    B, T, D = s.shape
    o = torch.empty_like(s)
    reversed_cumsum[(triton.cdiv(D, 32), B)](s, o, T, D, BT=64, BD=32)
    return o
