"""Bias and GELU in its tanh form.

Forward    z = x + b,  y = z S(z),  S = sigmoid(2 u),  u = sqrt(2 / pi) (z + 0.044715 z^3)
           (z S = z (1 + tanh u) / 2, the usual form, without a tanh)
Backward   dz = dy (S + z S (1 - S) 2 u'),  u' = sqrt(2 / pi) (1 + 0.134145 z^2);
           dx = dz,  db = sum over rows of dz

Forward schedule: 2D tiles.
Backward schedule: a program owns (row block, column tile), writes dx and the column sums of its block,
which are in registers anyway: db costs no second pass over dx, only [row blocks, N] partials, which a small
kernel adds.

op: bias_gelu
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gate(z):
    """S(z)."""
    return tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def bias_gelu_kernel(x_ptr, b_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    z = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    z += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], z * gate(z), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def bias_gelu(x, b):
    x, b = x.contiguous(), b.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    bias_gelu_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 64))](x, b, y, M, N, BLOCK_M=32, BLOCK_N=64)
    return y


def reference(x, b):
    return torch.nn.functional.gelu(x + b, approximate="tanh")


SWEEP = [{"M": 4096, "N": 16384}, {"M": 16384, "N": 3072}, {"M": 8191, "N": 2817}]
SWEEP_CPU = [{"M": 130, "N": 33}, {"M": 20, "N": 128}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def bias_gelu_backward_kernel(
    x_ptr, b_ptr, dy_ptr, dx_ptr, part_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    s = gate(z)
    dz = dy * (s + z * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z))
    tl.store(dx_ptr + offs, dz, mask=mask)
    tl.store(part_ptr + tl.program_id(0) * N + cols, tl.sum(dz, axis=0), mask=cols < N)


@triton.jit
def column_sum_kernel(part_ptr, out_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        total += tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        x, b = x.contiguous(), b.contiguous()
        ctx.save_for_backward(x, b)
        return bias_gelu(x, b)

    @staticmethod
    def backward(ctx, dy):
        x, b = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = x.shape
        G = triton.cdiv(M, 32)
        dx, db = torch.empty_like(x), torch.empty_like(b)
        part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        bias_gelu_backward_kernel[(G, triton.cdiv(N, 64))](x, b, dy, dx, part, M, N, BLOCK_M=32, BLOCK_N=64)
        column_sum_kernel[(triton.cdiv(N, 64),)](part, db, G, N, BLOCK_G=32, BLOCK_N=64)
        return dx if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def bias_gelu_autograd(x, b):
    return BiasGelu.apply(x, b)
