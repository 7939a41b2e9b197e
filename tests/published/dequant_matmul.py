"""y = x @ (scale * (q - zero)): a linear layer of 4-bit weights, eight to an integer, with a scale and a zero
for each group of rows. The gradient is that of x, and of the scales."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard


def get_autotune_configs():
    return [
        triton.Config({"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_M": 4}, num_stages=2, num_warps=4),
        triton.Config({"BLOCK_M": 32, "BLOCK_N": 32, "GROUP_M": 8}, num_stages=3, num_warps=4),
    ]


@triton.autotune(configs=get_autotune_configs(), key=["M", "N", "K"])
@triton.jit
def quant_matmul_kernel(
    a_ptr, b_ptr, c_ptr, scales_ptr, zeros_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_sg, stride_zg,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(axis=0)
    num_pid_m, num_pid_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    num_pid_in_group = GROUP_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_M)
    pid_m = first_pid_m + (pid % num_pid_in_group) % group_size_m
    pid_n = (pid % num_pid_in_group) // group_size_m

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, GROUP_SIZE)
    m_n = offs_n < N
    shifter = (offs_k % 8) * 4
    zeros_shifter = (offs_n % 8) * 4

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for g in range(tl.cdiv(K, GROUP_SIZE)):
        rows = g * GROUP_SIZE + offs_k
        a = tl.load(
            a_ptr + offs_m[:, None] * stride_am + rows[None, :] * stride_ak,
            mask=(offs_m < M)[:, None] & (rows < K)[None, :], other=0.0,
        )  # fmt: skip
        packed = tl.load(
            b_ptr + (rows // 8)[:, None] * stride_bk + offs_n[None, :] * stride_bn,
            mask=(rows < K)[:, None] & m_n[None, :], other=0,
        )  # fmt: skip
        scales = tl.load(scales_ptr + g * stride_sg + offs_n, mask=m_n, other=0.0)
        zeros = tl.load(zeros_ptr + g * stride_zg + offs_n // 8, mask=m_n, other=0)
        zeros = (zeros >> zeros_shifter) & 0xF
        b = (packed >> shifter[:, None]) & 0xF
        b = (b - zeros[None, :]).to(tl.float32) * scales[None, :]
        accumulator += tl.dot(a, b.to(a.dtype), input_precision="ieee")

    mask = (offs_m < M)[:, None] & m_n[None, :]
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, accumulator.to(c_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 2))
@input_guard
def quant_linear(x, qweight, scales, qzeros, group_size=32):
    outshape = (*x.shape[:-1], qweight.shape[1])
    x = x.reshape(-1, x.shape[-1])
    M, K = x.shape
    N = qweight.shape[1]
    assert qweight.shape[0] * 8 == K and K % group_size == 0, "rows come in whole groups"
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = lambda META: (triton.cdiv(M, META["BLOCK_M"]) * triton.cdiv(N, META["BLOCK_N"]),)
    quant_matmul_kernel[grid](
        x, qweight, y, scales, qzeros, M, N, K,
        x.stride(0), x.stride(1), qweight.stride(0), qweight.stride(1), y.stride(0), y.stride(1),
        scales.stride(0), qzeros.stride(0), GROUP_SIZE=group_size,
    )  # fmt: skip
    return y.reshape(outshape)


SWEEP = [{"B": 2, "T": 9, "K": 64, "N": 48}, {"B": 1, "T": 33, "K": 96, "N": 40, "required": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    K, N = dims["K"] // 32 * 32, dims["N"] // 8 * 8
    x = torch.randn(dims["B"], dims["T"], K, device=device, dtype=dtype)
    ints = {"dtype": torch.int32, "device": device}
    qweight = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), **ints)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (K // 32, N // 8), **ints)
    scales = torch.rand(K // 32, N, device=device, dtype=dtype) * 0.1
    return x, qweight, scales, qzeros
