"""Dropout whose mask is drawn again instead of stored.

Forward    y_i = x_i m_i / (1 - p),  m_i = [u_i >= p],  u_i the i-th number of the Philox stream of a seed
Backward   dx_i = dy_i m_i / (1 - p)

Forward schedule: flat tiles; the generator is counter-based, so an element's number depends on (seed, i)
alone.
Backward schedule: the map is linear and diagonal, so the backward is the same kernel on dy with the same
seed. Nothing is saved: neither x nor a mask, and drawing the numbers again is hidden behind the memory
traffic.

op: dropout
schedule: index_or_seed_replay
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def keeps(seed, offs, p):
    return tl.rand(seed, offs) >= p


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n_elements, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, tl.where(keeps(seed, offs, p), x / (1 - p), 0.0), mask=offs < n_elements)


@triton.jit
def keep_mask_kernel(mask_ptr, n_elements, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + offs, keeps(seed, offs, p).to(tl.int8), mask=offs < n_elements)


def apply_mask(x, p, seed):
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    if x.numel() > 2**31 - 512:
        raise ValueError(f"the numbers of {x.numel()} elements are counted in 32 bits")
    y = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), p, seed, BLOCK=512)
    return y


@autodiff(inputs_require_grad=(0,))
def dropout(x, p, seed):
    return apply_mask(x.contiguous(), p, seed)


def reference(x, p, seed):
    mask = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    keep_mask_kernel[(triton.cdiv(x.numel(), 512),)](mask, x.numel(), p, seed, BLOCK=512)
    return x * mask / (1 - p)


SWEEP = [{"N": 8192 * 14336}, {"N": 16384 * 4096}, {"N": 50000017}]
SWEEP_CPU = [{"N": 1101}, {"N": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),), {"p": 0.25, "seed": 20}


# ---- backward ----


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed
        return dropout(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        return apply_mask(dy.contiguous(), ctx.p, ctx.seed), None, None


def dropout_autograd(x, p, seed):
    return Dropout.apply(x, p, seed)
