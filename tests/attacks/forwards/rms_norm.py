"""RMS norm over the rows, with weight."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    r = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * r * w, mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def rms_norm(x, w, eps=1e-6):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    rms_norm_kernel[(M,)](x, w, y, N, eps, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 4, "N": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["M"], dims["N"], device=device, dtype=dtype), torch.randn(
        dims["N"], device=device, dtype=dtype
    )
