"""Direct 2-D convolution, valid padding, stride 1: one program per output row and channel."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "C": 3, "O": 4, "H": 7, "W": 9}]


@triton.jit
def conv2d_kernel(
    x_ptr, w_ptr, y_ptr, c, h, wd, o, oh, ow, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    channel = tl.program_id(1)
    batch = tl.program_id(2)
    cols = tl.arange(0, BLOCK)
    mask = cols < ow
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for ci in range(c):
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                x = tl.load(x_ptr + ((batch * c + ci) * h + row + i) * wd + cols + j, mask=mask, other=0.0)
                acc += x * tl.load(w_ptr + ((channel * c + ci) * KH + i) * KW + j)
    tl.store(y_ptr + ((batch * o + channel) * oh + row) * ow + cols, acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def conv2d(x, w):
    b, c, h, wd = x.shape
    o, _, kh, kw = w.shape
    oh, ow = h - kh + 1, wd - kw + 1
    y = torch.empty((b, o, oh, ow), device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(ow)
    conv2d_kernel[(oh, o, b)](x, w, y, c, h, wd, o, oh, ow, KH=kh, KW=kw, BLOCK=block)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return x, torch.randn(dims["O"], dims["C"], 3, 2, device=device, dtype=dtype)


def reference(x, w):
    return torch.nn.functional.conv2d(x, w)
