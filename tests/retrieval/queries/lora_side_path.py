import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def shrink(x, a, t, M, K, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    for s in range(0, K, BK):
        k = s + tl.arange(0, BK)
        xb = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        ab = tl.load(a + r[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc += tl.dot(xb, ab)
    tl.store(t + m[:, None] * R + r[None, :], acc, mask=(m < M)[:, None])


@triton.jit
def expand_add(base, t, b, y, alpha, M, N, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    tb = tl.load(t + m[:, None] * R + r[None, :], mask=(m < M)[:, None], other=0.0)
    bb = tl.load(b + n[None, :] * R + r[:, None], mask=(n < N)[None, :], other=0.0)
    ok = (m < M)[:, None] & (n < N)[None, :]
    o = tl.load(base + m[:, None] * N + n[None, :], mask=ok, other=0.0) + alpha * tl.dot(tb, bb)
    tl.store(y + m[:, None] * N + n[None, :], o, mask=ok)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def lora(x, base, a, b, alpha=2.0):
    M, K = x.shape
    N, R = b.shape
    t = x.new_empty(M, R)
    y = x.new_empty(M, N)
    shrink[(triton.cdiv(M, 32),)](x, a, t, M, K, R, 32, 64)
    expand_add[(triton.cdiv(M, 32), triton.cdiv(N, 64))](base, t, b, y, alpha, M, N, R, 32, 64)
    return y
