"""Batch norm over (batch, length) of x (batch, channel, length), with a scale and a shift that may be absent:
a program owns a channel.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def batch_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, B, C, L, eps, AFFINE: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // L * C + c) * L + i % L
        total += tl.load(x_ptr + offs, mask=i < B * L, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / (B * L)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // L * C + c) * L + i % L
        x = tl.load(x_ptr + offs, mask=i < B * L, other=0.0).to(tl.float32)
        centred = tl.where(i < B * L, x - mean, 0.0)
        squares += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / (B * L) + eps)
    w = 1.0
    b = 0.0
    if AFFINE:
        w = tl.load(w_ptr + c).to(tl.float32)
        b = tl.load(b_ptr + c).to(tl.float32)
    for start in range(0, B * L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // L * C + c) * L + i % L
        x = tl.load(x_ptr + offs, mask=i < B * L, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, (x - mean) * rstd * w + b, mask=i < B * L)


@autodiff(inputs_require_grad=(0, 1, 2))
def batch_norm(x, w=None, b=None, eps=1e-5):
    if (w is None) != (b is None):
        raise ValueError("a scale and a shift, or neither")
    x = x.contiguous()
    w = None if w is None else w.contiguous()
    b = None if b is None else b.contiguous()
    B, C, L = x.shape
    y = torch.empty_like(x)
    batch_norm_kernel[(C,)](x, w, b, y, B, C, L, eps, AFFINE=w is not None, BLOCK=64)
    return y


SWEEP = [{"B": 6, "C": 7, "L": 33, "affine": True}, {"B": 4, "C": 5, "L": 3001, "affine": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = 0.3 + torch.randn(dims["B"], C, dims["L"], device=device, dtype=dtype)
    if not dims["affine"]:
        return (x,)
    w = torch.randn(C, device=device, dtype=dtype)
    return x, w, torch.randn(C, device=device, dtype=dtype)
