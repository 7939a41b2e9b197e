"""Dynamic tanh: a pointwise stand-in for a norm, with one learned scalar inside.

Forward    t = tanh(a x),  y = t * w + b,  w and b a number a column, a one number
Backward   dx = dy * w * a (1 - t^2),  dw_j = sum_rows dy_j t_j,  db_j = sum_rows dy_j,
           da = sum_ij dy_ij w_j x_ij (1 - t_ij^2), which is <dx, x> / a without the division

Forward schedule: pointwise on (row, column tile). tanh(u) = 1 - 2 / (e^{2u} + 1), which ends at 1 and -1
where e^{2u} overflows or vanishes.
Backward schedule: nothing couples the elements of a row, so no program has to hold one: program (g, c) owns
a tile of columns and walks the rows g, g + G, ... It reads x and dy once, writes dx, and keeps three sums in
registers: dw and db of its columns, and lane by lane its part of da. Each is stored once in a row of its
own, three planes of one buffer; a second kernel adds the G rows of a column tile, and the plane of da down
to one number a tile. The last few numbers are torch's to add. Saving t would cost a tensor to spare a tanh.

op: dynamic_tanh
schedule: same_tile_pointwise, partials_then_reduce, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 512


@triton.jit
def tanh(u):
    return 1 - 2 / (tl.exp(2 * u) + 1)


@triton.jit
def dyt_kernel(x_ptr, a_ptr, w_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * N
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    a = tl.load(a_ptr).to(tl.float32)
    x = tl.load(x_ptr + offs + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs + cols, tanh(a * x) * w + b, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def dynamic_tanh(x, a, w, b):
    """x: (M, N); a: (1); w, b: (N)."""
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    dyt_kernel[(M, triton.cdiv(N, BLOCK))](x, a, w, b, y, N, BLOCK=BLOCK)
    return y


def reference(x, a, w, b):
    return torch.tanh(a * x) * w + b


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4099, "N": 1100}]
SWEEP_CPU = [{"M": 45, "N": 100}, {"M": 7, "N": 530}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    a = torch.full((1,), 0.5, device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype)
    return x, a, w, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----

GROUPS = 64  # of rows; with the column tiles of a few thousand columns some programs a multiprocessor


@triton.jit
def dyt_backward_kernel(
    x_ptr, a_ptr, w_ptr, dy_ptr, dx_ptr, dw_part, db_part, da_part, M, N, G, BLOCK: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    a = tl.load(a_ptr).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(group, M, G):
        offs = row * N + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        t = tanh(a * x)
        du = dy * w * (1 - t * t)
        tl.store(dx_ptr + offs, (du * a).to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * t
        db += dy
        da += tl.where(du == 0, 0.0, du * x)  # where tanh has ended x may be infinite
    own = group * N + cols
    tl.store(dw_part + own, dw, mask=mask)
    tl.store(db_part + own, db, mask=mask)
    tl.store(da_part + own, da, mask=mask)


@triton.jit
def parameter_sum_kernel(
    dw_part, db_part, da_part, dw_ptr, db_ptr, da_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    da = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        offs = rows[:, None] * N + cols[None, :]
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        dw += tl.load(dw_part + offs, mask=mask, other=0.0)
        db += tl.load(db_part + offs, mask=mask, other=0.0)
        da += tl.load(da_part + offs, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)
    tl.store(da_ptr + tl.program_id(0), tl.sum(tl.sum(da, axis=0), axis=0))


class DynamicTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, w, b):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, a, w)
        return dynamic_tanh(x, a, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, a, w = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = x.shape
        G, tiles = min(M, GROUPS), triton.cdiv(N, 64)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
        part = torch.empty((3, G, N), device=x.device, dtype=torch.float32)
        da = torch.empty(tiles, device=x.device, dtype=torch.float32)
        dyt_backward_kernel[(G, triton.cdiv(N, BLOCK))](x, a, w, dy, dx, *part, M, N, G, BLOCK=BLOCK)
        parameter_sum_kernel[(tiles,)](*part, dw, db, da, G, N, BLOCK_G=32, BLOCK_N=64)
        grads = zip((dx, da.sum().to(a.dtype).view(1), dw, db), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def dynamic_tanh_autograd(x, a, w, b):
    return DynamicTanh.apply(x, a, w, b)
