"""Gated unit whose gate is a power of a ReLU, with a learned exponent for the layer.

Forward    y = max(a, 0)^p b,  p > 1 one number
Backward   with u = a^p for a > 0, else 0:  da = dy b p a^(p-1) = dy b p u / a,  db = dy u,
           dp = sum over all elements of dy b u log a;  all are 0 for a <= 0

Forward schedule: flat tiles; a^p is 2^(p log2 a), two instructions of the special function unit.
Backward schedule: flat tiles in long stretches, one pass over a, b and dy. The logarithm is made for u and
serves dp as well, so the sum of dp costs one product an element; a program keeps it in a vector and leaves
one number in a slot, and a second kernel adds the slots. a = 0 is where everything would go wrong (log 0, 0 /
0), and half of all lanes are at or below it: they compute with a = 1 and are selected away after, so that no
infinity is ever multiplied with a 0.

op: pow_glu
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def power(a, p):
    """u, with log2 a and a itself where a > 0, else 0, 0 and 1."""
    safe = tl.where(a > 0, a, 1.0)
    log_a = tl.log2(safe)
    return tl.where(a > 0, tl.exp2(p * log_a), 0.0), log_a, safe


@triton.jit
def pow_glu_kernel(a_ptr, b_ptr, p_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u, _, _ = power(a, tl.load(p_ptr).to(tl.float32))
    tl.store(y_ptr + offs, (u * b).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def pow_glu(a, b, p):
    """a, b: one shape; p: one number, above 1."""
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    pow_glu_kernel[(triton.cdiv(a.numel(), 1024),)](a, b, p, y, a.numel(), BLOCK=1024)
    return y


def reference(a, b, p):
    return torch.where(a > 0, torch.where(a > 0, a, 1.0) ** p, 0.0) * b


SWEEP = [{"M": 8192, "N": 11008}, {"M": 4099, "N": 2817}]
SWEEP_CPU = [{"M": 5, "N": 96}, {"M": 3, "N": 6001}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, b = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return a, b, torch.tensor(1.75, device=device, dtype=dtype)


# ---- backward ----

CHUNK = 16384  # elements of a program


@triton.jit
def pow_glu_backward_kernel(
    a_ptr, b_ptr, p_ptr, dy_ptr, da_ptr, db_ptr, part_ptr, n_elements,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.load(p_ptr).to(tl.float32)
    terms = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offs = tl.program_id(0).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        mask = offs < n_elements
        a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        u, log_a, safe = power(a, p)
        db = dy * u
        da = db * b * p / safe
        tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + offs, db.to(db_ptr.dtype.element_ty), mask=mask)
        terms += db * b * log_a
    tl.store(part_ptr + tl.program_id(0), tl.sum(terms, axis=0))


@triton.jit
def exponent_kernel(part_ptr, dp_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(dp_ptr, (0.6931471805599453 * tl.sum(total, axis=0)).to(dp_ptr.dtype.element_ty))


class PowGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, p):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b, p)
        return pow_glu(a, b, p)

    @staticmethod
    def backward(ctx, dy):
        a, b, p = ctx.saved_tensors
        da, db, dp = torch.empty_like(a), torch.empty_like(b), None
        parts = triton.cdiv(a.numel(), CHUNK)
        part = torch.empty(parts, device=a.device, dtype=torch.float32)
        pow_glu_backward_kernel[(parts,)](
            a, b, p, dy.contiguous(), da, db, part, a.numel(), CHUNK=CHUNK, BLOCK=1024
        )
        if ctx.needs_input_grad[2]:
            dp = torch.empty_like(p)
            exponent_kernel[(1,)](part, dp, parts, BLOCK=1024)
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None, dp


def pow_glu_autograd(a, b, p):
    return PowGLU.apply(a, b, p)
