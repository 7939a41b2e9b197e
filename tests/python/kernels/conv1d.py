"""Direct 1-D convolution with a stride, valid padding: one program a tile of positions and an output
channel."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "C": 3, "O": 4, "L": 50, "STRIDE": 1}, {"B": 1, "C": 2, "O": 2, "L": 41, "STRIDE": 2}]


@triton.jit
def conv1d_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, c, length, o, out, stride, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1)
    batch = tl.program_id(2)
    mask = at < out
    acc = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(b_ptr + channel)
    for ci in range(c):
        for k in tl.static_range(TAPS):
            x = tl.load(x_ptr + (batch * c + ci) * length + at * stride + k, mask=mask, other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k)
    tl.store(y_ptr + (batch * o + channel) * out + at, acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def conv1d(x, w, bias, stride=1):
    b, c, length = x.shape
    o, _, taps = w.shape
    out = (length - taps) // stride + 1
    y = torch.empty((b, o, out), device=x.device, dtype=x.dtype)
    conv1d_kernel[(triton.cdiv(out, 16), o, b)](x, w, bias, y, c, length, o, out, stride, TAPS=taps, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["L"], device=device, dtype=dtype)
    w = torch.randn(dims["O"], dims["C"], 3, device=device, dtype=dtype)
    return (x, w, torch.randn(dims["O"], device=device, dtype=dtype)), {"stride": dims["STRIDE"]}


def reference(x, w, bias, stride=1):
    return torch.nn.functional.conv1d(x, w, bias, stride=stride)
