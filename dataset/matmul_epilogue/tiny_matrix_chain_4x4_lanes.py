"""Products of many 4 x 4 matrices, as of poses along a kinematic chain: too small for a dot.

Forward    C_b = A_b B_b,   A, B (batch, 4, 4)
Backward   dA_b = dC_b B_b^T,   dB_b = A_b^T dC_b

Forward schedule: a program holds a tile of the batch, the matrices as two small axes of one tensor. The
product is a broadcast multiplication over (row, k, column) and a sum over k, which stays inside a lane: 64
operations for 32 numbers read, so memory decides, and a tensor core would be padded sixteenfold.
Backward schedule: both gradients need dC, and each needs the factor that the other one's program would have
to read anyway. They share one program: it loads A, B and dC once, makes dA by summing over C's columns and dB
by summing over C's rows, and stores both. That is five transfers a matrix where two separate products make
six. A transposition is only another axis to sum over; nothing is moved.

op: small_matrix_batch
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 64


@triton.jit
def places(batch):
    """Where the numbers of a tile of matrices stand: (batch, row, column)."""
    four = tl.arange(0, 4)
    return batch[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]


@triton.jit
def small_product_kernel(a_ptr, b_ptr, c_ptr, size, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = places(batch), batch[:, None, None] < size
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    c = tl.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)
    tl.store(c_ptr + offs, c.to(c_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def small_product(a, b):
    """a, b: (..., 4, 4)."""
    if a.shape != b.shape or a.shape[-2:] != (4, 4):
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are no batches of 4 x 4 matrices")
    c, size = torch.empty(a.shape, device=a.device, dtype=a.dtype), a.numel() // 16
    small_product_kernel[(triton.cdiv(size, BLOCK),)](a.contiguous(), b.contiguous(), c, size, BLOCK=BLOCK)
    return c


def reference(a, b):
    return a @ b


SWEEP = [{"B": 1000000}, {"B": 30011}]
SWEEP_CPU = [{"B": 203}, {"B": 30}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, b = (torch.randn(dims["B"], 4, 4, device=device, dtype=dtype) for _ in range(2))
    return a, b


# ---- backward ----


@triton.jit
def small_product_backward_kernel(a_ptr, b_ptr, dc_ptr, da_ptr, db_ptr, size, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = places(batch), batch[:, None, None] < size
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dc = tl.load(dc_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    da = tl.sum(dc[:, :, None, :] * b[:, None, :, :], axis=3)
    db = tl.sum(a[:, :, :, None] * dc[:, :, None, :], axis=1)
    tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + offs, db.to(db_ptr.dtype.element_ty), mask=mask)


class SmallProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return small_product(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        da, db, size = torch.empty_like(a), torch.empty_like(b), a.numel() // 16
        small_product_backward_kernel[(triton.cdiv(size, BLOCK),)](
            a, b, dc.contiguous(), da, db, size, BLOCK=BLOCK
        )
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def small_product_autograd(a, b):
    return SmallProduct.apply(a, b)
