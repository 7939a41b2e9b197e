import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rotate_by_learned(x, omega, coords, y, N, HALF: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, HALF)
    ok = (n < N)[:, None]
    w = tl.load(omega + j)
    ang = tl.load(coords + n, mask=n < N, other=0.0)[:, None] * w[None, :]
    co, si = tl.cos(ang), tl.sin(ang)
    p = n[:, None] * (2 * HALF) + j[None, :]
    u = tl.load(x + p, mask=ok, other=0.0)
    v = tl.load(x + p + HALF, mask=ok, other=0.0)
    tl.store(y + p, u * co - v * si, mask=ok)
    tl.store(y + p + HALF, u * si + v * co, mask=ok)


@autodiff(inputs_require_grad=(0, 1))
def learned_rope(x, omega, coords):
    y = torch.empty_like(x)
    rotate_by_learned[(triton.cdiv(x.shape[0], 16),)](x, omega, coords, y, x.shape[0], x.shape[1] // 2, 16)
    return y
