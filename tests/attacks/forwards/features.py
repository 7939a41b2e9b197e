"""y = x w in tiles of 16; the features of x, and rows of dw with them, fall from 1 to 1e-6."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def features_kernel(x_ptr, w_ptr, y_ptr, M, N, K, T: tl.constexpr):
    rows, cols = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    acc = tl.zeros([T, T], dtype=tl.float32)
    for start in range(0, K, T):
        k = start + tl.arange(0, T)
        x = tl.load(
            x_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0
        )
        w = tl.load(
            w_ptr + k[:, None] * N + cols[None, :], mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0
        )
        acc += tl.dot(x, w, input_precision="ieee")
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@autodiff(inputs_require_grad=(0, 1))
def features(x, w):
    x, w = x.contiguous(), w.contiguous()
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    features_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 16))](x, w, y, M, N, K, T=16)
    return y


SWEEP = [{"M": 18, "N": 18, "K": 34}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    x *= torch.logspace(0, -6, dims["K"], device=device, dtype=dtype)
    return x, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)
