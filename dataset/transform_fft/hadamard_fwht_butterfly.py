"""Walsh-Hadamard transform of rows, orthonormal: the rotation that spreads outliers before quantisation.

Forward    y = H x / sqrt(N),  H_kn = (-1)^(number of bits that k and n share),  N a power of two
           as log2 N equal stages:  x -> (x_0 + x_1, x_2 + x_3, ..., x_0 - x_1, x_2 - x_3, ...)
Backward   H is symmetric:  dx = H dy / sqrt(N)

Forward schedule: a program owns a few rows, whole and in registers. A stage pairs neighbours and puts sums
before differences, which rotates the bits of the place by one; after log2 N stages every bit was the lowest
once, and the order is the natural one again. So all stages are one piece of code, with no strides that grow
and no reordering at the end, and N log N additions take the place of a product with an N x N matrix.
Backward schedule: the transform is its own adjoint (and, orthonormal, its own inverse): the forward's launch
on dy. Nothing is saved and nothing is rebuilt. The scale is applied once, at the end, in fp32.

op: hadamard
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def hadamard_kernel(x_ptr, y_ptr, M, scale, N: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs = rows[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs, mask=rows[:, None] < M, other=0.0).to(tl.float32)
    for _ in range(STAGES):
        a, b = tl.split(tl.reshape(x, [BLOCK, N // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [BLOCK, N])
    tl.store(y_ptr + offs, (x * scale).to(y_ptr.dtype.element_ty), mask=rows[:, None] < M)


def transform(x):
    N = x.shape[-1]
    if N < 2 or N & (N - 1) or N > 16384:
        raise ValueError(f"rows of {N}: the length must be a power of two from 2 to 16384")
    M, y = x.numel() // N, torch.empty_like(x)
    BLOCK = max(1, 1024 // N)
    tiles = {"N": N, "STAGES": N.bit_length() - 1, "BLOCK": BLOCK, "num_warps": 8 if N > 4096 else 4}
    hadamard_kernel[(triton.cdiv(M, BLOCK),)](x, y, M, N**-0.5, **tiles)
    return y


@autodiff(inputs_require_grad=(0,))
def hadamard(x):
    """x: (..., N), N a power of two."""
    return transform(x.contiguous())


def reference(x):
    shape, N = x.shape, x.shape[-1]
    x = x.reshape(-1, N)
    for stage in range(N.bit_length() - 1):
        a, b = x.reshape(-1, N >> (stage + 1), 2, 1 << stage).unbind(2)
        x = torch.stack([a + b, a - b], 2).reshape(-1, N)
    return x.reshape(shape) * N**-0.5


SWEEP = [{"M": 16384, "N": 4096}, {"M": 32749, "N": 128}]
SWEEP_CPU = [{"M": 37, "N": 64}, {"M": 3, "N": 2048}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


class Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return hadamard(x)

    @staticmethod
    def backward(ctx, dy):
        return transform(dy.contiguous())


def hadamard_autograd(x):
    return Hadamard.apply(x)
