"""Matrix product.

Forward    C = A B
Backward   dA = dC B^T,  dB = A^T dC

Forward schedule: a program owns a tile of C and walks K; program ids are grouped along M so that neighbours
share B in L2.
Backward schedule: both gradients are matrix products themselves, each with its own tile ownership: dA's
owner walks N, dB's owner walks M. The forward kernel takes strides, so a transpose is a swap of two
arguments and no copy is made: the backward is two launches of the kernel that is already tuned.

op: matmul
schedule: swap_owner
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(a):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    if a.dtype == torch.float32:
        return {"PRECISION": PRECISION, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    return {"PRECISION": PRECISION, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8}


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    in_group = pid % (GROUP_M * tiles_n)
    group_rows = tl.minimum(tl.cdiv(M, BLOCK_M) - group * GROUP_M, GROUP_M)
    m = (group * GROUP_M + in_group % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = in_group // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (m[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (n[None, :] < N)
        a_offs = m[:, None].to(tl.int64) * stride_am + k[None, :].to(tl.int64) * stride_ak
        b_offs = k[:, None].to(tl.int64) * stride_bk + n[None, :].to(tl.int64) * stride_bn
        a = tl.load(a_ptr + a_offs, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + b_offs, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    c_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=c_mask)


def launch_matmul(a, b):
    """a @ b for any strides."""
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    tiles = tiling(a)
    grid = (triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"]),)
    matmul_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), GROUP_M=8, **tiles)
    return c


@autodiff(inputs_require_grad=(0, 1))
def matmul(a, b):
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    return launch_matmul(a, b)


def reference(a, b):
    return a @ b


SWEEP = [
    {"M": 4096, "K": 4096, "N": 4096},
    {"M": 8192, "K": 2048, "N": 8192},
    {"M": 4095, "K": 1000, "N": 3001},
]
SWEEP_CPU = [{"M": 45, "K": 70, "N": 37}, {"M": 290, "K": 17, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    b = torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)
    return a, b


# ---- backward ----


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        da = launch_matmul(dc, b.t()) if ctx.needs_input_grad[0] else None
        db = launch_matmul(a.t(), dc) if ctx.needs_input_grad[1] else None
        return da, db


def matmul_autograd(a, b):
    return Matmul.apply(a, b)
