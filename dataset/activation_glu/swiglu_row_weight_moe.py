"""SwiGLU of routed rows, each scaled by its router's weight before the second product.

Forward    h = silu(a) b,  y = w_i h  for row i,  silu(a) = a s,  s = sigmoid(a)
Backward   da = dy w_i b s (1 + a (1 - s)),  db = dy w_i a s,  dw_i = <dy_i, h_i>

Forward schedule: rows by column tiles, pointwise.
Backward schedule: dw_i is a sum along the row, so the row gets one owner, who walks its column tiles: each
number of a, b and dy is read once, both gradients are written as the tile passes, and the products dy h,
whose factors are in registers then, add up in one vector, reduced after the walk. Scaling here instead of
after the second product is what makes that cheap: a row of h is at hand, the expert's output is not wanted
again, and dw comes without a pass, partials or atomics of its own. h is rebuilt: a and b are wanted in any
case, and saving it would add a write and a read.

op: swiglu_row_weight
schedule: row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def weighted_swiglu_kernel(a_ptr, b_ptr, w_ptr, y_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    a = tl.load(a_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(w_ptr + row).to(tl.float32) * a * tl.sigmoid(a) * b
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def weighted_swiglu(a, b, w):
    """a, b: (rows, F); w: (rows), the weight of each row's expert for its token."""
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    a, b, w = a.contiguous(), b.contiguous(), w.contiguous()
    M, F = a.shape
    y = torch.empty_like(a)
    weighted_swiglu_kernel[(M, triton.cdiv(F, 1024))](a, b, w, y, F, BLOCK=1024)
    return y


def reference(a, b, w):
    return w[:, None] * torch.nn.functional.silu(a) * b


SWEEP = [{"M": 16384, "F": 1408}, {"M": 8191, "F": 2050}]
SWEEP_CPU = [{"M": 29, "F": 60}, {"M": 3, "F": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, b = (torch.randn(dims["M"], dims["F"], device=device, dtype=dtype) for _ in range(2))
    return a, b, torch.rand(dims["M"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def weighted_swiglu_backward_kernel(
    a_ptr, b_ptr, w_ptr, dy_ptr, da_ptr, db_ptr, dw_ptr, F, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + row).to(tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < F
        a = tl.load(a_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        da = dy * w * b * s * (1 + a * (1 - s))
        db = dy * w * a * s
        tl.store(da_ptr + row * F + cols, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + row * F + cols, db.to(db_ptr.dtype.element_ty), mask=mask)
        products += dy * a * s * b
    tl.store(dw_ptr + row, tl.sum(products, axis=0).to(dw_ptr.dtype.element_ty))


class WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, w):
        a, b, w = a.contiguous(), b.contiguous(), w.contiguous()
        ctx.save_for_backward(a, b, w)
        return weighted_swiglu(a, b, w)

    @staticmethod
    def backward(ctx, dy):
        a, b, w = ctx.saved_tensors
        M, F = a.shape
        da, db, dw = torch.empty_like(a), torch.empty_like(b), torch.empty_like(w)
        BLOCK = min(1024, triton.next_power_of_2(F))
        weighted_swiglu_backward_kernel[(M,)](a, b, w, dy.contiguous(), da, db, dw, F, BLOCK=BLOCK)
        grads = zip((da, db, dw), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def weighted_swiglu_autograd(a, b, w):
    return WeightedSwiGLU.apply(a, b, w)
