"""A convolution in one dimension with a step, a dilation and zeros around: x (batch, in, length),
w (out, in, taps). A program owns a sample, an output channel and a block of positions.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def conv1d_kernel(
    x_ptr, w_ptr, y_ptr, I, O, L, P, step, dilation, pad, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    o = tl.program_id(1)
    pos = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(I):
        for t in range(TAPS):
            at = pos * step + t * dilation - pad
            inside = (pos < P) & (at >= 0) & (at < L)
            x = tl.load(x_ptr + (b * I + i) * L + at, mask=inside, other=0.0).to(tl.float32)
            acc += x * tl.load(w_ptr + (o * I + i) * TAPS + t).to(tl.float32)
    tl.store(y_ptr + (b * O + o) * P + pos, acc, mask=pos < P)


@autodiff(inputs_require_grad=(0, 1))
def conv1d(x, w, step=2, dilation=1, pad=1):
    x, w = x.contiguous(), w.contiguous()
    B, I, L = x.shape
    O, _, TAPS = w.shape
    P = (L + 2 * pad - dilation * (TAPS - 1) - 1) // step + 1
    if P < 1:
        raise ValueError("the row is shorter than the taps")
    y = torch.empty((B, O, P), device=x.device, dtype=x.dtype)
    grid = (B, O, triton.cdiv(P, 32))
    conv1d_kernel[grid](x, w, y, I, O, L, P, step, dilation, pad, TAPS=TAPS, BLOCK=32)
    return y


SWEEP = [
    {"B": 32, "I": 3, "O": 16, "L": 3000, "dilation": 1},
    {"B": 3, "I": 2, "O": 2, "L": 37, "dilation": 2},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["I"], dims["L"], device=device, dtype=dtype)
    w = torch.randn(dims["O"], dims["I"], 3, device=device, dtype=dtype)
    return (x, w), {"step": 2, "dilation": dims["dilation"], "pad": 1}
