"""GELU, tanh form, over a flat tensor."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def _activation(src, dst, numel, SPAN: tl.constexpr):
    i = tl.program_id(axis=0)
    p = tl.make_block_ptr(
        base=src, shape=(numel,), strides=(1,), offsets=(i * SPAN,), block_shape=(SPAN,), order=(0,)
    )
    q = tl.make_block_ptr(
        base=dst, shape=(numel,), strides=(1,), offsets=(i * SPAN,), block_shape=(SPAN,), order=(0,)
    )
    v = tl.load(p, boundary_check=(0,), padding_option="zero").to(tl.float32)
    inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    th = 2 * tl.sigmoid(2 * inner) - 1
    tl.store(q, (0.5 * v * (1 + th)).to(dst.dtype.element_ty), boundary_check=(0,))


@autodiff(inputs_require_grad=(0,))
def apply_gelu(inp):
    out = torch.empty_like(inp)
    _activation[(triton.cdiv(inp.numel(), 1024),)](inp, out, inp.numel(), SPAN=1024)
    return out
