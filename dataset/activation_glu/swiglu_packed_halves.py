"""SwiGLU of one packed tensor, as a fused gate-and-up projection leaves it.

Forward    x = [a | b] along the last axis,  y = silu(a) b,  silu(a) = a s,  s = sigmoid(a)
Backward   dx = [da | db],  da = dy b s (1 + a (1 - s)),  db = dy a s

Forward schedule: a program owns (row, column tile) of y and reads the two columns j and j + F of x.
Backward schedule: the same tiles, and each writes to both halves of one dx. Splitting x first and joining
da and db later would be a copy of 2 F columns each way; here the halves are two offsets into one allocation,
dx is contiguous as the product that made x wants it, and the pass moves what it must: 3 F columns in and
2 F out. s is made again, one exp, rather than saved.

op: swiglu_packed
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
def swiglu_packed_kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    a = tl.load(x_ptr + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    y = a * tl.sigmoid(a) * b
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def swiglu_packed(x):
    """x: (..., 2 F), the gate first; gives (..., F)."""
    x = x.contiguous()
    if x.shape[-1] % 2:
        raise ValueError(f"{x.shape[-1]} columns have no two halves")
    F = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], F), device=x.device, dtype=x.dtype)
    swiglu_packed_kernel[(x.numel() // (2 * F), triton.cdiv(F, 1024))](x, y, F, BLOCK=1024)
    return y


def reference(x):
    a, b = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(a) * b


SWEEP = [{"M": 2048, "F": 11008}, {"M": 4099, "F": 2730}]
SWEEP_CPU = [{"M": 29, "F": 51}, {"M": 2, "F": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], 2 * dims["F"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def swiglu_packed_backward_kernel(x_ptr, dy_ptr, dx_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    first = row * 2 * F + cols
    a = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + first + F, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    da = dy * b * s * (1 + a * (1 - s))
    db = dy * a * s
    tl.store(dx_ptr + first, da.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + first + F, db.to(dx_ptr.dtype.element_ty), mask=mask)


class SwiGLUPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return swiglu_packed(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        F = x.shape[-1] // 2
        dx = torch.empty_like(x)
        grid = (x.numel() // (2 * F), triton.cdiv(F, 1024))
        swiglu_packed_backward_kernel[grid](x, dy.contiguous(), dx, F, BLOCK=1024)
        return dx


def swiglu_packed_autograd(x):
    return SwiGLUPacked.apply(x)
