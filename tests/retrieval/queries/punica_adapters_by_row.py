import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sgmv(x, a, b, y, seg, which, K, N, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    s = tl.program_id(0)
    lo, hi = tl.load(seg + s), tl.load(seg + s + 1)
    ad = tl.load(which + s)
    m = lo + tl.program_id(1) * BM + tl.arange(0, BM)
    if lo + tl.program_id(1) * BM < hi:
        r = tl.arange(0, R)
        t = tl.zeros((BM, R), tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            xv = tl.load(
                x + m[:, None] * K + k[None, :], mask=(m < hi)[:, None] & (k < K)[None, :], other=0.0
            )
            t += tl.dot(
                xv, tl.load(a + (ad * K + k)[:, None] * R + r[None, :], mask=(k < K)[:, None], other=0.0)
            )
        for n0 in range(0, N, BN):
            n = n0 + tl.arange(0, BN)
            bv = tl.load(b + (ad * R + r)[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)
            tl.store(
                y + m[:, None] * N + n[None, :],
                tl.dot(t.to(bv.dtype), bv),
                mask=(m < hi)[:, None] & (n < N)[None, :],
            )


@autodiff(inputs_require_grad=(0, 1, 2))
def adapters(x, a, b, seg, which, longest):
    K, R, N = a.shape[1], a.shape[2], b.shape[2]
    y = x.new_empty(x.shape[0], N)
    sgmv[(which.numel(), triton.cdiv(longest, 16))](x, a, b, y, seg, which, K, N, R, 16, 64, 32)
    return y
