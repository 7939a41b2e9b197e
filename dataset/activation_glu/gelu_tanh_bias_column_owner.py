"""Bias and GELU in its tanh form, for wide layers: a column tile has one owner in the backward.

Forward    z = x + b,  y = z (1 + tanh u) / 2 = z s,  u = c (z + k z^3),  s = sigmoid(2 u),
           c = sqrt(2 / pi),  k = 0.044715
Backward   dz = dy (s + z s sigmoid(-2 u) 2 u'),  u' = c (1 + 3 k z^2);  dx = dz,  db = sum over rows of dz

Forward schedule: 2D tiles.
Backward schedule: columns of a hidden layer are many, so tiles of them alone fill a device: the owner of a
narrow column tile walks all rows, stores dx as it goes, and has db complete in registers at the end. One
launch, no partials to store and add, and a result that does not depend on how rows were cut. A tile is tall
and only as wide as whole memory sectors want, 32 numbers: less would waste traffic, more would leave fewer
owners. With few columns and many rows it would be the wrong way round: then blocks of rows leave partials.

op: bias_gelu
schedule: same_tile_pointwise, swap_owner
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def two_u(z):
    return 1.5957691216057308 * (z + 0.044715 * z * z * z)


@triton.jit
def bias_gelu_kernel(x_ptr, b_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offs, (z * tl.sigmoid(two_u(z))).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def bias_gelu(x, b):
    """x: (M, N); b: (N)."""
    M, N = x.shape
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 8), triton.cdiv(N, 128))
    bias_gelu_kernel[grid](x.contiguous(), b.contiguous(), y, M, N, BLOCK_M=8, BLOCK_N=128)
    return y


def reference(x, b):
    return torch.nn.functional.gelu(x + b, approximate="tanh")


SWEEP = [{"M": 4096, "N": 28672}, {"M": 2047, "N": 14336}]
SWEEP_CPU = [{"M": 45, "N": 70}, {"M": 131, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x = torch.randn(M, N, device=device, dtype=dtype)
    return x, torch.randn(N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def column_kernel(
    x_ptr, b_ptr, dy_ptr, dx_ptr, db_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) + b[None, :]
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        s, rest = tl.sigmoid(two_u(z)), tl.sigmoid(-two_u(z))
        dz = dy * (s + z * s * rest * 1.5957691216057308 * (1 + 0.134145 * z * z))
        tl.store(dx_ptr + offs, dz.to(dx_ptr.dtype.element_ty), mask=mask)
        db += dz
    tl.store(db_ptr + cols, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        x, b = x.contiguous(), b.contiguous()
        ctx.save_for_backward(x, b)
        return bias_gelu(x, b)

    @staticmethod
    def backward(ctx, dy):
        x, b = ctx.saved_tensors
        M, N = x.shape
        dx, db = torch.empty_like(x), torch.empty_like(b)
        column_kernel[(triton.cdiv(N, 32),)](x, b, dy.contiguous(), dx, db, M, N, BLOCK_M=64, BLOCK_N=32)
        return dx if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def bias_gelu_autograd(x, b):
    return BiasGelu.apply(x, b)
