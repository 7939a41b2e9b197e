"""Rows scaled so that the largest number is 127, and the scales: what stands before rounding to int8.

Forward    n the first c with the largest |x_c|,  m = |x_n|,   y_c = x_c 127 / m, and 0 in a row of zeros
Backward   every y_c is divided by m, which only x_n moves:
           dx_c = dy_c 127 / m + [c = n] sign(x_n) (dm - sum_c dy_c y_c / m)

Forward schedule: a program owns a row in one tile; m and n are stored, y and m are the outputs.
Backward schedule: the same owner; one sum a row, and a correction that goes to a single lane, the saved
place. A comparison of |x_c| with m would find every number as large as the largest, and rounding makes
several of them in short formats. y is not saved: it is x 127 / m again. The lane's own part cancels, y_n
being 127 or -127 whatever x_n is, and left in the sum it cancels only up to rounding: lane n is kept out of
both.

op: absmax_scale
schedule: row_reduce_correct, index_or_seed_replay, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def absmax_scale_kernel(x_ptr, y_ptr, m_ptr, n_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    a = tl.where(x > 0, x, tl.where(x < 0, -x, 0.0))  # its derivative at 0 is 0
    n = tl.argmax(a, axis=0)
    m = tl.sum(tl.where(cols == n, a, 0.0), axis=0)
    y = tl.where(m > 0, x * (127 / tl.where(m > 0, m, 1.0)), 0.0)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
    tl.store(m_ptr + row, m)
    tl.store(n_ptr + row, n)


def absmax_scale_forward(x):
    N = x.shape[-1]
    if not 1 <= N <= 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    m = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    n = torch.empty(x.shape[:-1], device=x.device, dtype=torch.int32)
    absmax_scale_kernel[(m.numel(),)](x, y, m, n, N, BLOCK=triton.next_power_of_2(N))
    return y, m, n


@autodiff(inputs_require_grad=(0,))
def absmax_scale(x):
    """x: (..., N); gives y like x, and m (...) in float32."""
    return absmax_scale_forward(x.contiguous())[:2]


def reference(x):
    m = x.abs().max(-1, keepdim=True).values
    return torch.where(m > 0, x * 127 / torch.where(m > 0, m, 1.0), 0.0), m[..., 0]


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1000}]
SWEEP_CPU = [{"M": 27, "N": 65}, {"M": 90, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def absmax_scale_backward_kernel(x_ptr, m_ptr, n_ptr, dy_ptr, dm_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    m, n = tl.load(m_ptr + row), tl.load(n_ptr + row)
    scale = tl.where(m > 0, 127 / tl.where(m > 0, m, 1.0), 0.0)
    others = tl.sum(tl.where(cols == n, 0.0, dy * x), axis=0)
    dm = tl.load(dm_ptr + row) - others * scale / tl.where(m > 0, m, 1.0)
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    dx = tl.where(cols == n, sign * dm, dy * scale)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class AbsmaxScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, m, n = absmax_scale_forward(x)
        ctx.save_for_backward(x, m, n)
        return y, m

    @staticmethod
    def backward(ctx, dy, dm):
        x, m, n = ctx.saved_tensors
        N, dx = x.shape[-1], torch.empty_like(x)
        grid, BLOCK = (m.numel(),), triton.next_power_of_2(N)
        absmax_scale_backward_kernel[grid](x, m, n, dy.contiguous(), dm.contiguous(), dx, N, BLOCK=BLOCK)
        return dx


def absmax_scale_autograd(x):
    return AbsmaxScale.apply(x)
