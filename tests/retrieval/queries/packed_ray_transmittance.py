import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ray_weights(tau, first, count, colour, out, BS: tl.constexpr):
    ray = tl.program_id(0)
    s0 = tl.load(first + ray)
    n = tl.load(count + ray)
    before = 0.0
    acc = 0.0
    for k in range(0, n, BS):
        i = k + tl.arange(0, BS)
        ok = i < n
        t = tl.load(tau + s0 + i, mask=ok, other=0.0)
        incl = tl.cumsum(t, 0)
        w = tl.exp(-(before + incl - t)) * (1.0 - tl.exp(-t))
        acc += tl.sum(w * tl.load(colour + s0 + i, mask=ok, other=0.0), 0)
        before += tl.sum(t, 0)
    tl.store(out + ray, acc)


@autodiff(inputs_require_grad=(0, 3))
def march(tau, first, count, colour):
    out = tau.new_empty(first.numel())
    ray_weights[(first.numel(),)](tau, first, count, colour, out, BS=64)
    return out
