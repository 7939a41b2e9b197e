import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gate_up(x, wg, wu, h, first, D, F, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    e = tl.program_id(0)
    lo, hi = tl.load(first + e), tl.load(first + e + 1)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    for m0 in range(lo, hi, BM):
        m = m0 + tl.arange(0, BM)
        g = tl.zeros((BM, BN), tl.float32)
        u = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, D, BK):
            k = k0 + tl.arange(0, BK)
            a = tl.load(x + m[:, None] * D + k[None, :], mask=(m < hi)[:, None] & (k < D)[None, :], other=0.0)
            at = e * D * F + k[:, None] * F + n[None, :]
            ok = (k < D)[:, None] & (n < F)[None, :]
            g += tl.dot(a, tl.load(wg + at, mask=ok, other=0.0))
            u += tl.dot(a, tl.load(wu + at, mask=ok, other=0.0))
        tl.store(
            h + m[:, None] * F + n[None, :],
            g / (1 + tl.exp(-g)) * u,
            mask=(m < hi)[:, None] & (n < F)[None, :],
        )


@triton.jit
def down(h, wd, y, first, D, F, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    e = tl.program_id(0)
    lo, hi = tl.load(first + e), tl.load(first + e + 1)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    for m0 in range(lo, hi, BM):
        m = m0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, F, BK):
            k = k0 + tl.arange(0, BK)
            a = tl.load(h + m[:, None] * F + k[None, :], mask=(m < hi)[:, None] & (k < F)[None, :], other=0.0)
            b = tl.load(
                wd + e * D * F + k[:, None] * D + n[None, :],
                mask=(k < F)[:, None] & (n < D)[None, :],
                other=0.0,
            )
            acc += tl.dot(a, b)
        tl.store(y + m[:, None] * D + n[None, :], acc, mask=(m < hi)[:, None] & (n < D)[None, :])


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def experts(x, wg, wu, wd, first):
    E, D, F = wg.shape
    h = x.new_empty(x.shape[0], F)
    y = torch.empty_like(x)
    gate_up[(E, triton.cdiv(F, 32))](x, wg, wu, h, first, D, F, 16, 32, 32)
    down[(E, triton.cdiv(D, 32))](h, wd, y, first, D, F, 16, 32, 32)
    return y
