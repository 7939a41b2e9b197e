import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def tanh_(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def lstm_time(xg, wh, hs, T, B, H: tl.constexpr, BB: tl.constexpr):
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j = tl.arange(0, H)
    ok = (b < B)[:, None]
    wi = tl.load(wh + j[:, None] * 4 * H + j[None, :])
    wf = tl.load(wh + j[:, None] * 4 * H + H + j[None, :])
    wg = tl.load(wh + j[:, None] * 4 * H + 2 * H + j[None, :])
    wo = tl.load(wh + j[:, None] * 4 * H + 3 * H + j[None, :])
    h = tl.zeros((BB, H), tl.float32)
    c = tl.zeros((BB, H), tl.float32)
    for t in range(T):
        p = xg + (t * B + b)[:, None] * 4 * H + j[None, :]
        i = tl.sigmoid(tl.load(p, mask=ok, other=0.0) + tl.dot(h, wi))
        f = tl.sigmoid(tl.load(p + H, mask=ok, other=0.0) + tl.dot(h, wf))
        g = tanh_(tl.load(p + 2 * H, mask=ok, other=0.0) + tl.dot(h, wg))
        o = tl.sigmoid(tl.load(p + 3 * H, mask=ok, other=0.0) + tl.dot(h, wo))
        c = f * c + i * g
        h = o * tanh_(c)
        tl.store(hs + (t * B + b)[:, None] * H + j[None, :], h, mask=ok)


@autodiff(inputs_require_grad=(0, 1))
def lstm(xg, wh):
    T, B, G = xg.shape
    hs = xg.new_empty(T, B, G // 4)
    lstm_time[(triton.cdiv(B, 16),)](xg, wh, hs, T, B, H=G // 4, BB=16)
    return hs
