"""Softplus with a bias, as a state-space layer makes its step sizes; the slope comes from the output.

Forward    u = x + b,  y = log(1 + e^u)
Backward   dy/du = sigmoid(u) = e^u / (1 + e^u) = 1 - e^(-y):  du = dy (1 - e^(-y)),  dx = du,
           db = sum over rows of du

Forward schedule: 2D tiles.
Backward schedule: the slope is a function of the value, and the value is the step size that the scan after it
saves for itself: x, as large, need not be kept, nor is b read. A program owns (row block, column tile) and
walks its rows; the sums of du are in registers, and a block leaves one row of partials, which a second
kernel adds. Small steps are the rule, y of a thousandth, and there 1 - e^(-y) is a difference of ones: it
comes from a series below 0.2. Above that y may be rounded to a short dtype without harm: an error of y is
one of y e^(-y) in the slope.

op: softplus_bias
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_N": 64}


@triton.jit
def log_1p(e):
    """log(1 + e) for e from 0 to 1, with the digits of a small e."""
    series = e * (1 - e * (1.0 / 2 - e * (1.0 / 3 - e * (1.0 / 4 - e * (1.0 / 5 - e / 6)))))
    return tl.where(e < 0.06, series, tl.log(1 + e))


@triton.jit
def softplus_kernel(x_ptr, b_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    u = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    y = tl.where(u > 0, u, 0.0) + log_1p(tl.exp(tl.where(u > 0, -u, u)))
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def softplus_bias(x, b):
    """x: (M, N); b: (N)."""
    M, N = x.shape
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"]))
    softplus_kernel[grid](x.contiguous(), b.contiguous(), y, M, N, **TILE)
    return y


def reference(x, b):
    return torch.nn.functional.softplus(x + b)


SWEEP = [{"M": 16384, "N": 5120}, {"M": 65537, "N": 80}]
SWEEP_CPU = [{"M": 37, "N": 70}, {"M": 150, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Biases such that step sizes are from about 0.001 to 1."""
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, (-6 * torch.rand(dims["N"], device=device)).to(dtype)


# ---- backward ----

PROGRAMS = 2048  # a few for each multiprocessor


@triton.jit
def softplus_backward_kernel(
    y_ptr, dy_ptr, dx_ptr, part_ptr, M, N, per_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(per_block):
        rows = (block * per_block + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        series = y * (1 - y * (1.0 / 2 - y * (1.0 / 6 - y * (1.0 / 24 - y * (1.0 / 120 - y / 720)))))
        du = dy * tl.where(y < 0.2, series, 1 - tl.exp(-y))
        tl.store(dx_ptr + offs, du.to(dx_ptr.dtype.element_ty), mask=mask)
        total += du
    tl.store(part_ptr + block * N + cols, tl.sum(total, axis=0), mask=cols < N)


@triton.jit
def bias_kernel(part_ptr, db_ptr, blocks, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, blocks, BLOCK_G):
        i = start + tl.arange(0, BLOCK_G)
        mask = (i[:, None] < blocks) & (cols[None, :] < N)
        total += tl.load(part_ptr + i[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(db_ptr + cols, tl.sum(total, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)


class SoftplusBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        y = softplus_bias(x, b)
        ctx.save_for_backward(y)
        ctx.bias_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        (M, N), dx, db = y.shape, torch.empty_like(y), None
        tiles, columns = triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"])
        per_block = max(1, triton.cdiv(tiles * columns, PROGRAMS))
        blocks = triton.cdiv(tiles, per_block)
        part = torch.empty((blocks, N), device=y.device, dtype=torch.float32)
        softplus_backward_kernel[(blocks, columns)](y, dy.contiguous(), dx, part, M, N, per_block, **TILE)
        if ctx.needs_input_grad[1]:
            db = torch.empty(N, device=y.device, dtype=ctx.bias_dtype)
            bias_kernel[(triton.cdiv(N, 64),)](part, db, blocks, N, BLOCK_G=16, BLOCK_N=64)
        return dx if ctx.needs_input_grad[0] else None, db


def softplus_bias_autograd(x, b):
    return SoftplusBias.apply(x, b)
