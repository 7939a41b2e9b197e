"""x[rows of group g] @ w[g] for packed groups: a program a tile, its group found from the offsets."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.index import bounds
from ops.utils import ensure_contiguous, packed


@triton.jit
def grouped_gemm_kernel(
    x, w, y, offsets, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i_m, i_n, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = bounds(offsets, i_g)
    if i_m * BM >= count:
        return
    rows = i_m * BM + tl.arange(0, BM)
    cols = i_n * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.static_range(0, K, BK):
        inner = k + tl.arange(0, BK)
        a = tl.load(
            x + (first + rows)[:, None].to(tl.int64) * K + inner[None, :],
            mask=(rows < count)[:, None] & (inner < K)[None, :],
            other=0.0,
        )
        b = tl.load(
            w + i_g.to(tl.int64) * K * N + inner[:, None] * N + cols[None, :],
            mask=(inner < K)[:, None] & (cols < N)[None, :],
            other=0.0,
        )
        acc += tl.dot(a, b)
    at = (first + rows)[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(y + at, acc, mask=(rows < count)[:, None] & (cols < N)[None, :])


@autodiff(inputs_require_grad=(0, 1))
@ensure_contiguous
def grouped_gemm(x, w, offsets):
    M, K = x.shape
    G, _, N = w.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    longest = int((offsets[1:] - offsets[:-1]).max())
    grid = (triton.cdiv(longest, 16), triton.cdiv(N, 16), G)
    grouped_gemm_kernel[grid](x, w, y, offsets, N=N, K=K, BM=16, BN=16, BK=16)
    return y


SWEEP = [{"M": 45, "N": 20, "K": 40}]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    offsets = packed(dims["M"], device)
    return x, torch.randn(len(offsets) - 1, dims["K"], dims["N"], device=device, dtype=dtype), offsets
