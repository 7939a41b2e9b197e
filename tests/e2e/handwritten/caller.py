"""RMS norm: a function with defaults calls apply, and the backward has nothing for eps."""

import numpy as np
import torch
import triton
import triton.language as tl

SWEEP = [{"M": 5, "N": 24}]


@triton.jit
def _fwd(x_ptr, w_ptr, y_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _bwd(x_ptr, w_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0)
    g = dy * tl.load(w_ptr + cols, mask=mask, other=0.0)
    r = tl.load(rstd_ptr + row)
    tl.store(dx_ptr + row * N + cols, r * g - x * (r * r * r / N) * tl.sum(g * x, axis=0), mask=mask)
    tl.atomic_add(dw_ptr + cols, dy * x * r, mask=mask)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        y, rstd = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
        M, N = x.shape
        _fwd[(M,)](x, weight, y, rstd, N, eps, BLOCK=triton.next_power_of_2(N))
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, rstd = ctx.saved_tensors
        M, N = x.shape
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        _bwd[(M,)](x, weight, rstd, grad_output.contiguous(), dx, dw, N, BLOCK=triton.next_power_of_2(N))
        return dx, dw, None


def rms_norm(x, weight, eps=1e-6):
    return RMSNormFunction.apply(x, weight, eps)


def reference(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def make_args(dims, device="cuda", dtype=torch.float32):
    np.random.seed(0)
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)
