"""Layer norm with scale and shift for rows of any length: three passes over the row, a block of columns
at a time.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, row_stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    y_ptr += row * row_stride

    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N

    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        centred = tl.where(cols < N, x - mean, 0.0)
        squares += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)

    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < N
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, (x - mean) * rstd * w + b, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    N = x.shape[-1]
    M = x.numel() // N
    y = torch.empty_like(x)
    BLOCK = min(1024, triton.next_power_of_2(N))
    layer_norm_kernel[(M,)](x, weight, bias, y, N, N, eps, BLOCK=BLOCK)
    return y


def reference(x, weight, bias, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


SWEEP = [
    {"M": 4096, "N": 1024},
    {"M": 8192, "N": 4096},
    {"M": 1151, "N": 8191},
    {"M": 4096, "N": 16384, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 0.5 + 2.3 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    weight = torch.rand(dims["N"], device=device, dtype=dtype)
    bias = torch.rand(dims["N"], device=device, dtype=dtype)
    return x, weight, bias
