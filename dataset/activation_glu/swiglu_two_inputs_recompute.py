"""SwiGLU of two inputs.

Forward    y = silu(a) * b,  silu(a) = a s,  s = sigmoid(a)
Backward   silu'(a) = s + a s (1 - s) = s (1 + a (1 - s)), so
           da = dy * b * s (1 + a (1 - s)),   db = dy * a s

Forward schedule: flat tiles over all elements.
Backward schedule: the same flat tiles. The sigmoid is recomputed from a: one exp an element costs nothing
beside the memory traffic, and saving it would cost a read and a write more. da and db leave one pass over
a, b and dy.

op: swiglu
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def swiglu_kernel(a_ptr, b_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, a * tl.sigmoid(a) * b, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def swiglu(a, b):
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    swiglu_kernel[(triton.cdiv(y.numel(), 1024),)](a, b, y, y.numel(), BLOCK=1024)
    return y


def reference(a, b):
    return torch.nn.functional.silu(a) * b


SWEEP = [{"M": 8192, "N": 14336}, {"M": 4096, "N": 11008}, {"M": 4099, "N": 2817}]
SWEEP_CPU = [{"M": 33, "N": 90}, {"M": 4, "N": 256}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["M"], dims["N"])
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def swiglu_backward_kernel(a_ptr, b_ptr, dy_ptr, da_ptr, db_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(da_ptr + offs, dy * b * s * (1 + a * (1 - s)), mask=mask)
    tl.store(db_ptr + offs, dy * a * s, mask=mask)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return swiglu(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        dy = dy.contiguous()
        da, db = torch.empty_like(a), torch.empty_like(b)
        swiglu_backward_kernel[(triton.cdiv(a.numel(), 1024),)](a, b, dy, da, db, a.numel(), BLOCK=1024)
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def swiglu_autograd(a, b):
    return SwiGLU.apply(a, b)
