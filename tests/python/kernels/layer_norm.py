"""Layer norm with rows longer than a block: three loops, fp16 or fp32, optional bias."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 100, "BIAS": True}, {"M": 2, "N": 64, "BIAS": False}]


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * n
    y_ptr += row * n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    spread = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        centred = tl.where(cols < n, x - mean, 0.0)
        spread += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(spread, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n
        y = (tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        y = y * tl.load(w_ptr + cols, mask=mask)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=mask)
        tl.store(y_ptr + cols, y, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, w, b, eps=1e-5):
    m, n = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(m, device=x.device, dtype=torch.float32)
    rstd = torch.empty(m, device=x.device, dtype=torch.float32)
    layer_norm_kernel[(m,)](x, w, b, y, mean, rstd, n, eps, BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float16):
    n = dims["N"]
    x = torch.randn(dims["M"], n, device=device, dtype=dtype)
    w = torch.randn(n, device=device, dtype=dtype)
    return x, w, torch.randn(n, device=device, dtype=dtype) if dims["BIAS"] else None


def reference(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, x.shape[1:], w, b, eps)
