import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rdft(x, re, im, R, N, F, BR: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    a = tl.zeros((BR, BF), tl.float32)
    b = tl.zeros((BR, BF), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        v = tl.load(x + r[:, None] * N + n[None, :], mask=(r < R)[:, None] & (n < N)[None, :], other=0.0)
        turn = ((n[:, None] * f[None, :]) % N).to(tl.float32) * (6.283185307179586 / N)
        a += tl.dot(v, tl.cos(turn))
        b -= tl.dot(v, tl.sin(turn))
    ok = (r < R)[:, None] & (f < F)[None, :]
    tl.store(re + r[:, None] * F + f[None, :], a, mask=ok)
    tl.store(im + r[:, None] * F + f[None, :], b, mask=ok)


@autodiff(inputs_require_grad=(0,))
def rfft(x):
    R, N = x.shape
    F = N // 2 + 1
    re, im = x.new_empty(R, F), x.new_empty(R, F)
    rdft[(triton.cdiv(R, 16), triton.cdiv(F, 32))](x, re, im, R, N, F, 16, 32, 32)
    return re, im
