import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ms_deform(
    value, shapes, starts, loc, attn, out, S, Q, M, D: tl.constexpr, L: tl.constexpr, P: tl.constexpr
):
    b, q, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    base = (b * Q + q) * M + m
    for l in range(L):
        h, w = tl.load(shapes + 2 * l), tl.load(shapes + 2 * l + 1)
        s0 = tl.load(starts + l)
        for p in range(P):
            k = (base * L + l) * P + p
            x = tl.load(loc + 2 * k) * w - 0.5
            y = tl.load(loc + 2 * k + 1) * h - 0.5
            a = tl.load(attn + k)
            x0, y0 = tl.floor(x), tl.floor(y)
            for i in tl.static_range(4):
                xi, yi = x0 + i % 2, y0 + i // 2
                wt = (1 - tl.abs(x - xi)) * (1 - tl.abs(y - yi))
                ok = (xi >= 0) & (xi < w) & (yi >= 0) & (yi < h)
                at = (b * S + s0 + yi.to(tl.int32) * w + xi.to(tl.int32)) * M + m
                acc += a * wt * tl.load(value + at * D + d, mask=ok, other=0.0)
    tl.store(out + base * D + d, acc)


@autodiff(inputs_require_grad=(0, 3, 4))
def deformable_attention(value, shapes, starts, loc, attn):
    B, S, M, D = value.shape
    _, Q, _, L, P = attn.shape
    out = value.new_empty(B, Q, M, D)
    ms_deform[(B, Q, M)](value, shapes, starts, loc, attn, out, S, Q, M, D, L, P)
    return out
