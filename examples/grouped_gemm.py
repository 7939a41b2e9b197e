"""Grouped GEMM, as in a mixture of experts: rows of x are sorted by group, and group g multiplies its own
weight w[g].

A fixed number of programs stays resident; each walks the groups and takes every n-th output tile, so that
groups of uneven size still keep all of them busy.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def grouped_gemm_kernel(
    x_ptr, w_ptr, ends_ptr, y_ptr,
    G, N, K,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_tile = 0
    row_begin = 0
    for g in range(G):
        row_end = tl.load(ends_ptr + g)
        last_tile = first_tile + tl.cdiv(row_end - row_begin, BLOCK_M) * tiles_n
        while tile < last_tile:
            local = tile - first_tile
            offs_m = row_begin + (local // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
            offs_n = (local % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
            in_m = offs_m[:, None] < row_end
            in_n = offs_n[None, :] < N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start_k in range(0, K, BLOCK_K):
                offs_k = start_k + tl.arange(0, BLOCK_K)
                x = tl.load(
                    x_ptr + offs_m[:, None] * K + offs_k[None, :],
                    mask=in_m & (offs_k[None, :] < K),
                    other=0.0,
                )
                w_offs = (g * K + offs_k[:, None]) * N + offs_n[None, :]
                w = tl.load(w_ptr + w_offs, mask=(offs_k[:, None] < K) & in_n, other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
            tl.store(
                y_ptr + offs_m[:, None] * N + offs_n[None, :],
                acc.to(y_ptr.dtype.element_ty),
                mask=in_m & in_n,
            )
            tile += NUM_PROGRAMS
        first_tile = last_tile
        row_begin = row_end


def resident_programs(device):
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4


@autodiff(inputs_require_grad=(0, 1))
def grouped_gemm(x, w, ends):
    """x: (rows, K); w: (groups, K, N); ends: int32 (groups,), the row after the last of each group."""
    G, K, N = w.shape
    y = torch.empty((x.shape[0], N), device=x.device, dtype=x.dtype)
    programs = resident_programs(x.device)
    grouped_gemm_kernel[(programs,)](
        x.contiguous(), w.contiguous(), ends, y,
        G, N, K,
        NUM_PROGRAMS=programs, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def flops(dims, mode):
    forward = 2 * dims["M"] * dims["N"] * dims["K"]
    return forward * {"fwd": 1, "bwd": 2}.get(mode, 3)


SWEEP = [
    {"G": 8, "M": 8192, "N": 2048, "K": 1024},
    {"G": 16, "M": 4096, "N": 1024, "K": 2048},
    {"G": 5, "M": 1003, "N": 500, "K": 260},
]


def make_args(dims, device="cuda", dtype=torch.float16):
    G, M, N, K = dims["G"], dims["M"], dims["N"], dims["K"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = torch.randn(G, K, N, device=device, dtype=dtype) / K**0.5
    share = torch.arange(G, 0, -1, dtype=torch.float64)  # group 0 is the largest, the last the smallest
    ends = (share.cumsum(0) / share.sum() * M).round().to(device=device, dtype=torch.int32)
    return x, w, ends
