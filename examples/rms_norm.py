"""RMS norm with a learned scale, y = x / sqrt(mean(x^2) + eps) * w: one program a row."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, row_stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(y_ptr + row * row_stride + cols, x * rstd * w, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def rms_norm(x, weight, eps: float = 1e-6):
    x2d = x.reshape(-1, x.shape[-1])
    M, N = x2d.shape
    y = torch.empty_like(x2d)
    BLOCK = triton.next_power_of_2(N)
    rms_norm_kernel[(M,)](
        x2d, weight, y, x2d.stride(0), N, eps, BLOCK=BLOCK, num_warps=8 if BLOCK >= 4096 else 4
    )
    return y.view(x.shape)


def reference(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


SWEEP = [
    {"B": 8, "T": 2048, "N": 4096},
    {"B": 4, "T": 1024, "N": 8192},
    {"B": 2, "T": 999, "N": 2560},
]


def make_args(dims, device="cuda", dtype=torch.float16):
    x = torch.randn(dims["B"], dims["T"], dims["N"], device=device, dtype=dtype)
    weight = 1 + 0.1 * torch.randn(dims["N"], device=device, dtype=dtype)
    return (x, weight), {"eps": 1e-6}
