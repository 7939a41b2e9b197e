"""Frequency encoding of coordinates, as in radiance fields: sines and cosines of doubling frequencies.

Forward    for each of D coordinates, with the point itself first:
           y = [x, sin x, cos x, sin 2x, cos 2x, .., sin 2^(L-1) x, cos 2^(L-1) x],  each of them D numbers
Backward   dx = dy_x + sum_l 2^l (ds_l cos 2^l x - dc_l sin 2^l x),  with dy = [dy_x, ds_0, dc_0, ds_1, ..]

Forward schedule: a program owns a flat tile of (point, coordinate) and walks the L levels; doubling is exact
in floating point, so every level's angle is, and the sine is asked anew rather than taken from the one
before.
Backward schedule: 2 L + 1 numbers come back for each coordinate and one goes out, so its owner keeps it in a
register and walks the levels in the same order, with angle and factor doubling together. It saves x, which is
2 L + 1 times smaller than y; the saved y would have had the cosines for the sines' slope and the other way
round, at the cost of reading all of it.

op: frequency_encoding
schedule: recompute_from_stats, row_reduce_correct
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def encode_kernel(x_ptr, y_ptr, n, D, L, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    y = y_ptr + at // D * D * (2 * L + 1) + at % D
    tl.store(y, x, mask=mask)
    for level in range(L):
        tl.store(y + (2 * level + 1) * D, tl.sin(x), mask=mask)
        tl.store(y + (2 * level + 2) * D, tl.cos(x), mask=mask)
        x += x


@autodiff(inputs_require_grad=(0,))
def encode(x, L):
    """x: (M, D) float32; gives (M, (2 L + 1) D)."""
    x, (M, D) = x.contiguous(), x.shape
    y = torch.empty((M, (2 * L + 1) * D), device=x.device, dtype=x.dtype)
    encode_kernel[(triton.cdiv(M * D, BLOCK),)](x, y, M * D, D, L, BLOCK=BLOCK)
    return y


def reference(x, L):
    parts = [x]
    for level in range(L):
        parts += [torch.sin(2**level * x), torch.cos(2**level * x)]
    return torch.cat(parts, dim=1)


SWEEP = [{"M": 1048576, "D": 3, "L": 10}, {"M": 300007, "D": 5, "L": 4}]
SWEEP_CPU = [{"M": 57, "D": 3, "L": 6}, {"M": 91, "D": 4, "L": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    L = min(dims["L"], 12)  # beyond, float32 has no digits left of the angle
    return torch.rand(dims["M"], dims["D"], device=device, dtype=dtype) * 2 - 1, L


# ---- backward ----


@triton.jit
def encode_backward_kernel(x_ptr, dy_ptr, dx_ptr, n, D, L, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dy = dy_ptr + at // D * D * (2 * L + 1) + at % D
    dx = tl.load(dy, mask=mask, other=0.0)
    factor = 1.0
    for level in range(L):
        ds = tl.load(dy + (2 * level + 1) * D, mask=mask, other=0.0)
        dc = tl.load(dy + (2 * level + 2) * D, mask=mask, other=0.0)
        dx += factor * (ds * tl.cos(x) - dc * tl.sin(x))
        x += x
        factor *= 2.0
    tl.store(dx_ptr + at, dx, mask=mask)


class Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, L):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.L = L
        return encode(x, L)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx, n = torch.empty_like(x), x.numel()
        encode_backward_kernel[(triton.cdiv(n, BLOCK),)](
            x, dy.contiguous(), dx, n, x.shape[1], ctx.L, BLOCK=BLOCK
        )
        return dx, None


def encode_autograd(x, L):
    return Encode.apply(x, L)
