"""Layer norm over the last axis, one row a program, on 30 widths: y = (x - mean) * rstd * w + b."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 4096, "N": n} for n in range(1024, 15873, 512)]


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + cols, (centred * rstd * w + b).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, w, b):
    m, n = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    layer_norm_kernel[(m,)](x.contiguous(), w, b, y, n, 1e-5, BLOCK=block, num_warps=8)
    return y


def make_args(dims, device="cuda", dtype=torch.float16):
    n = dims["N"]
    x = torch.randn(dims["M"], n, device=device, dtype=dtype)
    w = torch.rand(n, device=device, dtype=dtype)
    return x, w, torch.rand(n, device=device, dtype=dtype)


def reference(x, w, b):
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, 1e-5)
