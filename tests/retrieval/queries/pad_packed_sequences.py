import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def unpack(values, cu, padded, L, D, fill, BT: tl.constexpr, BD: tl.constexpr):
    b = tl.program_id(2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    start = tl.load(cu + b)
    length = tl.load(cu + b + 1) - start
    inside = (t < length)[:, None] & (d < D)[None, :]
    v = tl.load(values + (start + t)[:, None] * D + d[None, :], mask=inside, other=fill)
    tl.store(padded + (b * L + t)[:, None] * D + d[None, :], v, mask=(t < L)[:, None] & (d < D)[None, :])


@autodiff(inputs_require_grad=(0,))
def pad_input(values, cu, L, fill=0.0):
    B, D = cu.numel() - 1, values.shape[1]
    padded = values.new_empty(B, L, D)
    unpack[(triton.cdiv(L, 32), triton.cdiv(D, 64), B)](values, cu, padded, L, D, fill, 32, 64)
    return padded
