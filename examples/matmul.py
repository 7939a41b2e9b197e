"""C = activation(A @ B) with fp32 accumulation. Program ids are grouped along M, so that programs that
run together share tiles of B in L2; K need not be a multiple of its block.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_am, stride_ak,
    stride_bk, stride_bn,
    stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = (pid // tiles_in_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % tiles_in_group) % group_m
    pid_n = (pid % tiles_in_group) // group_m

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        k_left = K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=(offs_m[:, None] < M) & (offs_k[None, :] < k_left), other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k[:, None] < k_left) & (offs_n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk

    if ACTIVATION == "leaky_relu":
        acc = leaky_relu(acc)
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


@autodiff(inputs_require_grad=(0, 1))
def matmul(a, b, activation=None):
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)
    matmul_kernel[grid](
        a, b, c,
        M, N, K,
        a.stride(0), a.stride(1),
        b.stride(0), b.stride(1),
        c.stride(0), c.stride(1),
        BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8,
        ACTIVATION=activation or "",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return c


def reference(a, b, activation=None):
    c = a @ b
    return torch.nn.functional.leaky_relu(c, 0.01) if activation == "leaky_relu" else c


def flops(dims, mode):
    forward = 2 * dims["M"] * dims["N"] * dims["K"]
    return forward * {"fwd": 1, "bwd": 2}.get(mode, 3)


SWEEP = [
    {"M": 2048, "N": 2048, "K": 2048, "leaky": False},
    {"M": 4096, "N": 1024, "K": 4096, "leaky": True},
    {"M": 1000, "N": 777, "K": 555, "leaky": True},
    {"M": 8192, "N": 8192, "K": 8192, "leaky": False, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float16):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    b = torch.randn(dims["K"], dims["N"], device=device, dtype=dtype) / dims["K"] ** 0.5
    return (a, b), {"activation": "leaky_relu" if dims["leaky"] else None}
