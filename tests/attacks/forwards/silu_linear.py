"""y = silu(x @ w + bias), with the steps of every matrix passed on; bias may be absent.

x: (M, K), w: (K, N).
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def linear_silu_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, x_m, x_k, w_k, w_n,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * x_m + k[None, :] * x_k,
                    mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)  # fmt: skip
        w = tl.load(w_ptr + k[:, None] * w_k + cols[None, :] * w_n,
                    mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0)  # fmt: skip
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    y = acc * tl.sigmoid(acc)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_silu(x, w, bias=None):
    M, K = x.shape
    N = w.shape[1]
    bias = None if bias is None else bias.contiguous()
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    linear_silu_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](
        x, w, bias, y, M, N, K, *x.stride(), *w.stride(),
        BIAS=bias is not None, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32,
    )  # fmt: skip
    return y


SWEEP = [{"M": 70, "N": 40, "K": 50, "bias": True}, {"M": 33, "N": 20, "K": 65, "bias": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N, K = dims["M"], dims["N"], dims["K"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = torch.randn(K, N, device=device, dtype=dtype) / K**0.5
    return (x, w, torch.randn(N, device=device, dtype=dtype)) if dims["bias"] else (x, w)
