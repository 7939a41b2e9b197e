"""Matrix times vector: a linear layer for a single token, bound by reading the matrix.

Forward    y = A x,  A (M, N)
Backward   dA_ij = dy_i x_j,   dx = A^T dy:  dx_j = sum_i A_ij dy_i

Forward schedule: a program owns a tile of rows and walks the columns; A is read once, in order.
Backward schedule: dA is as large as A and has rank one: two vectors in, a tile out, bound by writing. dx is a
sum down the columns, and a few hundred column tiles would each walk all rows: too few programs to keep the
memory busy where M is large. So the grid is the tiles of a coarse grid on A: a program takes a part of the
rows of its columns, multiplies and adds row by row in order, and, since it is at that place of A anyway,
writes that part of dA from the dy and x that it holds. Its share of dx goes to a slot; a second kernel adds
the slots. One walk, A read once and dA written once: no gradient costs more than its own traffic.

op: gemv
schedule: swap_owner, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gemv_kernel(a_ptr, x_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, N, COLS):
        j = start + tl.arange(0, COLS)
        mask = (i[:, None] < M) & (j[None, :] < N)
        a = tl.load(a_ptr + i[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * tl.load(x_ptr + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + i, tl.sum(total, axis=1).to(y_ptr.dtype.element_ty), mask=i < M)


@autodiff(inputs_require_grad=(0, 1))
def gemv(a, x):
    """a: (M, N); x: (N)."""
    M, N = a.shape
    if x.shape != (N,):
        raise ValueError(f"{N} columns and {tuple(x.shape)} numbers")
    y = torch.empty(M, device=a.device, dtype=a.dtype)
    gemv_kernel[(triton.cdiv(M, 8),)](a.contiguous(), x.contiguous(), y, M, N, ROWS=8, COLS=256)
    return y


def reference(a, x):
    return a @ x


SWEEP = [{"M": 16384, "N": 8192}, {"M": 5003, "N": 30001}]
SWEEP_CPU = [{"M": 60, "N": 95}, {"M": 300, "N": 270}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) / max(1, dims["N"]) ** 0.5
    return a, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----

PART = 128  # rows that one program walks


@triton.jit
def part_kernel(
    a_ptr, x_ptr, dy_ptr, da_ptr, slots_ptr, M, N, WANT_A: tl.constexpr, WANT_X: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + j, mask=j < N, other=0.0).to(tl.float32)
    dx = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, PART, ROWS):
        i = part * PART + start + tl.arange(0, ROWS)
        mask = (i[:, None] < M) & (j[None, :] < N)
        offs = i[:, None].to(tl.int64) * N + j[None, :]
        dy = tl.load(dy_ptr + i, mask=i < M, other=0.0).to(tl.float32)[:, None]
        if WANT_A:
            tl.store(da_ptr + offs, (dy * x[None, :]).to(da_ptr.dtype.element_ty), mask=mask)
        if WANT_X:
            dx += dy * tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if WANT_X:
        tl.store(slots_ptr + part.to(tl.int64) * N + j, tl.sum(dx, axis=0), mask=j < N)


@triton.jit
def sum_slots_kernel(slots_ptr, dx_ptr, count, N, SLOTS: tl.constexpr, COLS: tl.constexpr):
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([SLOTS, COLS], dtype=tl.float32)
    for start in range(0, count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        mask = (slot[:, None] < count) & (j[None, :] < N)
        total += tl.load(slots_ptr + slot[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=0.0)
    tl.store(dx_ptr + j, tl.sum(total, axis=0).to(dx_ptr.dtype.element_ty), mask=j < N)


class Gemv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        a, x = a.contiguous(), x.contiguous()
        ctx.save_for_backward(a, x)
        return gemv(a, x)

    @staticmethod
    def backward(ctx, dy):
        a, x = ctx.saved_tensors
        (M, N), (want_a, want_x) = a.shape, ctx.needs_input_grad
        da, dx = torch.empty_like(a) if want_a else None, torch.empty_like(x) if want_x else None
        count = triton.cdiv(M, PART)
        slots = torch.empty((count, N), device=a.device, dtype=torch.float32)
        part_kernel[(count, triton.cdiv(N, 256))](
            a, x, dy.contiguous(), da, slots, M, N, WANT_A=want_a, WANT_X=want_x, PART=PART, ROWS=8, COLS=256
        )
        if want_x:
            sum_slots_kernel[(triton.cdiv(N, 64),)](slots, dx, count, N, SLOTS=16, COLS=64)
        return da, dx


def gemv_autograd(a, x):
    return Gemv.apply(a, x)
