"""Orthonormal cosine transform of rows.

Forward    y_k = sum_n C_kn x_n,  C_kn = c_k cos(pi (2 n + 1) k / (2 N)),
           c_0 = sqrt(1 / N), else c_k = sqrt(2 / N)
Backward   C is orthogonal: dx_n = sum_k C_kn dy_k, the inverse transform

Forward schedule: a program owns (row tile, frequency tile) and walks n; tiles of C are generated in
registers, so the matrix is never stored or read.
Backward schedule: the same kernel with the roles of k and n exchanged when the tile is generated. Nothing
is saved. The angle is reduced as an integer, (2 n + 1) k mod 4 N, before it becomes a float, so its
precision does not fall with N.

op: dct
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def dct_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    INVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
    for start in range(0, N, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        if INVERSE:
            k, n = i[:, None], o[None, :]
        else:
            k, n = o[None, :], i[:, None]
        angle = ((2 * n + 1) * k % (4 * N)).to(tl.float32) * (3.141592653589793 / 2 / N)
        c = tl.cos(angle) * tl.sqrt(tl.where(k == 0, 1.0, 2.0) / N)
        x_mask = (m[:, None] < M) & (i[None, :] < N)
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * N + i[None, :], mask=x_mask, other=0.0).to(tl.float32)
        acc = tl.dot(x, c, acc, input_precision=PRECISION)
    y_mask = (m[:, None] < M) & (o[None, :] < N)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + o[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


def transform(x, inverse):
    N = x.shape[-1]
    if N > 16384:
        raise ValueError(f"(2 n + 1) k overflows 32 bits for N = {N}")
    M = x.numel() // N
    y = torch.empty_like(x)
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (triton.cdiv(M, 64), triton.cdiv(N, 32))
    dct_kernel[grid](x, y, M, N, INVERSE=inverse, PRECISION=PRECISION, BLOCK_M=64, BLOCK_O=32, BLOCK_I=32)
    return y


@autodiff(inputs_require_grad=(0,))
def dct(x):
    return transform(x.contiguous(), False)


def reference(x):
    N = x.shape[-1]
    n = torch.arange(N, device=x.device, dtype=x.dtype)
    c = torch.cos(torch.pi * (2 * n + 1) * n[:, None] / (2 * N)) * (2 / N) ** 0.5
    c = torch.cat([c[:1] * 0.5**0.5, c[1:]])
    return x @ c.t()


SWEEP = [{"M": 16384, "N": 1024}, {"M": 4096, "N": 4096}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 70, "N": 40}, {"M": 5, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


class DCT(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return dct(x)

    @staticmethod
    def backward(ctx, dy):
        return transform(dy.contiguous(), True)


def dct_autograd(x):
    return DCT.apply(x)
