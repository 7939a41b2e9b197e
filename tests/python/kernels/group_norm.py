"""Group norm over (C/G, H) with per-channel scale and shift."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "C": 6, "G": 3, "H": 10}]


@triton.jit
def group_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, c, g, h, eps, BLOCK: tl.constexpr):
    batch = tl.program_id(0)
    group = tl.program_id(1)
    per = c // g
    size = per * h
    base = (batch * c + group * per) * h
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0)
    mean = tl.sum(x, 0) / size
    d = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 0) / size + eps)
    channel = group * per + at // h
    w = tl.load(w_ptr + channel, mask=mask)
    b = tl.load(b_ptr + channel, mask=mask)
    tl.store(y_ptr + base + at, d * rstd * w + b, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def group_norm(x, w, b, groups):
    n, c, h = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(c // groups * h)
    group_norm_kernel[(n, groups)](x, w, b, y, c, groups, h, 1e-5, BLOCK=block)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["H"], device=device, dtype=dtype)
    w, b = (torch.randn(dims["C"], device=device, dtype=dtype) for _ in range(2))
    return x, w, b, dims["G"]


def reference(x, w, b, groups):
    return torch.nn.functional.group_norm(x, groups, w, b, 1e-5)
