import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ragged_bmm(seq_off, jag, dense, bias, out, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    b = tl.program_id(0)
    s, e = tl.load(seq_off + b), tl.load(seq_off + b + 1)
    i0 = tl.program_id(1) * BM
    if i0 >= e - s:
        return
    m = i0 + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(
            jag + (s + m)[:, None] * K + k[None, :], mask=(m < e - s)[:, None] & (k < K)[None, :], other=0.0
        )
        w = tl.load(
            dense + b * K * N + k[:, None] * N + n[None, :],
            mask=(k < K)[:, None] & (n < N)[None, :],
            other=0.0,
        )
        acc += tl.dot(a, w)
    acc += tl.load(bias + b * N + n, mask=n < N, other=0.0)[None, :]
    tl.store(out + (s + m)[:, None] * N + n[None, :], acc, mask=(m < e - s)[:, None] & (n < N)[None, :])


@autodiff(inputs_require_grad=(1, 2, 3))
def jagged_linear(seq_off, jag, dense, bias, max_len):
    B, K, N = dense.shape
    out = jag.new_empty(jag.shape[0], N)
    ragged_bmm[(B, triton.cdiv(max_len, 32), triton.cdiv(N, 64))](
        seq_off, jag, dense, bias, out, K, N, 32, 64, 32
    )
    return out
