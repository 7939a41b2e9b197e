import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from kernel_agent import autodiff


@triton.jit
def gru_seq(x_proj, u, h_all, T, B, H: tl.constexpr, BB: tl.constexpr):
    rows = tl.program_id(0) * BB + tl.arange(0, BB)
    k = tl.arange(0, H)
    live = (rows < B)[:, None]
    ur = tl.load(u + k[:, None] * 3 * H + k[None, :])
    uz = tl.load(u + k[:, None] * 3 * H + H + k[None, :])
    un = tl.load(u + k[:, None] * 3 * H + 2 * H + k[None, :])
    h = tl.zeros((BB, H), tl.float32)
    for t in range(T):
        base = x_proj + (t * B + rows)[:, None] * 3 * H + k[None, :]
        r = tl.sigmoid(tl.load(base, mask=live, other=0.0) + tl.dot(h, ur))
        z = tl.sigmoid(tl.load(base + H, mask=live, other=0.0) + tl.dot(h, uz))
        n = libdevice.tanh(tl.load(base + 2 * H, mask=live, other=0.0) + r * tl.dot(h, un))
        h = (1 - z) * n + z * h
        tl.store(h_all + (t * B + rows)[:, None] * H + k[None, :], h, mask=live)


@autodiff(inputs_require_grad=(0, 1))
def gru(x_proj, u):
    T, B, G = x_proj.shape
    h_all = x_proj.new_empty(T, B, G // 3)
    gru_seq[(triton.cdiv(B, 16),)](x_proj, u, h_all, T, B, G // 3, 16)
    return h_all
