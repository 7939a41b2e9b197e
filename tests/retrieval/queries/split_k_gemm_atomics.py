import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def splitk(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    i, j, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = i * BM + tl.arange(0, BM)
    n = j * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(part * BK, K, BK * SPLIT):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        y = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="tf32")
    tl.atomic_add(
        c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :], sem="relaxed"
    )


@autodiff(inputs_require_grad=(0, 1))
def tall_matmul(a, b):
    M, K = a.shape
    N = b.shape[1]
    c = torch.zeros(M, N, device=a.device, dtype=torch.float32)
    splitk[(triton.cdiv(M, 32), triton.cdiv(N, 32), 8)](a, b, c, M, N, K, 32, 32, 64, 8)
    return c
