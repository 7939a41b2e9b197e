"""Local attention for a decoder, with the module around it."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import triton
import triton.language as tl
from kernel_agent import autodiff


@dataclass
class LocalConfig:
    dim: int = 1024
    heads: int = 16
    window: int = 512
    layers: int = 24

    @property
    def head_dim(self):
        return self.dim // self.heads


def window_memory(config, batch, element_size):
    return 2 * batch * config.window * config.dim * element_size * config.layers


def cosine_schedule(step, warmup, total, peak):
    if step < warmup:
        return peak * step / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@triton.jit
def _local_attn_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, T, W, scale, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * T * D
    r = tile * BR + tl.arange(0, BR)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + r[:, None] * D + d[None, :], mask=r[:, None] < T, other=0.0)
    m = tl.full((BR,), -1e30, tl.float32)
    l = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, D), tl.float32)
    begin = tl.maximum(0, (tile * BR - W) // BC * BC)
    end = tl.minimum((tile + 1) * BR, T)
    for c0 in range(begin, end, BC):
        c = c0 + tl.arange(0, BC)
        k = tl.load(k_ptr + head + c[:, None] * D + d[None, :], mask=c[:, None] < T, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        gap = r[:, None] - c[None, :]
        s = tl.where((gap >= 0) & (gap < W) & (c[None, :] < T), s, -1e30)
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.where(s > -1e29, tl.exp(s - mn[:, None]), 0.0)
        a = tl.exp(m - mn)
        l = l * a + tl.sum(p, 1)
        v = tl.load(v_ptr + head + c[:, None] * D + d[None, :], mask=c[:, None] < T, other=0.0)
        acc = acc * a[:, None] + tl.dot(p.to(v.dtype), v)
        m = mn
    tl.store(o_ptr + head + r[:, None] * D + d[None, :], acc / l[:, None], mask=r[:, None] < T)
    tl.store(lse_ptr + tl.program_id(1) * T + r, m + tl.log(l), mask=r < T)


@autodiff(inputs_require_grad=(0, 1, 2))
def local_attention(q, k, v, window=512):
    BH, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(BH, T, device=q.device, dtype=torch.float32)
    _local_attn_kernel[(triton.cdiv(T, 64), BH)](q, k, v, o, lse, T, window, D**-0.5, D=D, BR=64, BC=64)
    return o


class LocalAttention(nn.Module):
    def __init__(self, config: LocalConfig):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            p.view(b, t, self.config.heads, -1).transpose(1, 2).flatten(0, 1).contiguous()
            for p in self.qkv(x).chunk(3, -1)
        )
        y = local_attention(q, k, v, self.config.window)
        return self.proj(y.view(b, self.config.heads, t, -1).transpose(1, 2).flatten(2))
