"""Swish with a learned slope: one number for the whole layer.

Forward    y = x s(b x),  s the sigmoid,  b a scalar
Backward   with u = b x and s' = s(u) s(-u):  dx = dy s(u) (1 + u s(-u)),
           db = sum over all elements of dy x^2 s(u) s(-u)

Forward schedule: flat tiles.
Backward schedule: flat tiles in long stretches. A program walks a stretch, stores dx tile by tile, keeps the
terms of db in a vector, and reduces it once; then it makes one atomic addition of one number. All programs
meet at that address, so their number decides: a few for each multiprocessor, however large the tensor is, is
a thousand additions, which take less time than launching a second kernel would. The sum's order, and with it
its last digit, may differ between runs; where that must not be, programs leave slots.

op: swish_beta
schedule: same_tile_pointwise, atomic_accumulate
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def swish_kernel(x_ptr, b_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(tl.load(b_ptr).to(tl.float32) * x)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0, 1))
def swish_beta(x, b):
    """x: any shape; b: one number."""
    x = x.contiguous()
    y = torch.empty_like(x)
    swish_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, b, y, x.numel(), BLOCK=BLOCK)
    return y


def reference(x, b):
    return x * torch.sigmoid(b * x)


SWEEP = [{"M": 8192, "N": 14336}, {"M": 4099, "N": 2817}]
SWEEP_CPU = [{"M": 9, "N": 100}, {"M": 3, "N": 700}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.tensor(1.25, device=device, dtype=dtype)


# ---- backward ----

PROGRAMS = 1024  # at most


@triton.jit
def swish_backward_kernel(
    x_ptr, b_ptr, dy_ptr, dx_ptr, db_ptr, n_elements, tiles, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.load(b_ptr).to(tl.float32)
    terms = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(tiles):
        offs = (tl.program_id(0).to(tl.int64) * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
        u = b * x
        s, rest = tl.sigmoid(u), tl.sigmoid(-u)
        dx = dy * s * (1 + u * rest)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=offs < n_elements)
        terms += dy * x * x * s * rest
    tl.atomic_add(db_ptr, tl.sum(terms, axis=0), sem="relaxed")


class SwishBeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        x = x.contiguous()
        ctx.save_for_backward(x, b)
        return swish_beta(x, b)

    @staticmethod
    def backward(ctx, dy):
        x, b = ctx.saved_tensors
        dx, db = torch.empty_like(x), torch.zeros_like(b, dtype=torch.float32)
        count = triton.cdiv(x.numel(), BLOCK)
        tiles = max(1, triton.cdiv(count, PROGRAMS))
        swish_backward_kernel[(triton.cdiv(count, tiles),)](
            x, b, dy.contiguous(), dx, db, x.numel(), tiles, BLOCK=BLOCK
        )
        return dx if ctx.needs_input_grad[0] else None, db.to(b.dtype) if ctx.needs_input_grad[1] else None


def swish_beta_autograd(x, b):
    return SwishBeta.apply(x, b)
