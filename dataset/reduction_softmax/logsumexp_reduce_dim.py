"""Log-sum-exp over the last axis.

Forward    y = log sum_j exp(x_j) = m + log sum_j exp(x_j - m)
Backward   dy/dx_j = exp(x_j - y), the softmax, so dx_j = exp(x_j - y) * dy

Forward schedule: a row's owner walks the row once with an online maximum and sum.
Backward schedule: the output y is itself the only statistic needed. With it every element is independent,
so the rows are cut in a 2D grid of (row, column tile) programs without any loop or reduction: long rows are
spread over the whole device.

op: logsumexp
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def logsumexp_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    tl.store(y_ptr + row, m + tl.log(s))


def logsumexp_forward(x):
    """Returns y in the dtype of x, and in fp32 for the backward."""
    N = x.shape[-1]
    y = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    logsumexp_kernel[(y.numel(),)](x, y, N, BLOCK=min(1024, triton.next_power_of_2(N)))
    return y.to(x.dtype), y


@autodiff(inputs_require_grad=(0,))
def logsumexp(x):
    return logsumexp_forward(x.contiguous())[0]


def reference(x):
    return torch.logsumexp(x, dim=-1)


SWEEP = [{"M": 4096, "N": 32000}, {"M": 1000, "N": 128256}, {"M": 8191, "N": 5003}]
SWEEP_CPU = [{"M": 23, "N": 210}, {"M": 3, "N": 1500}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (3 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def logsumexp_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    y = tl.load(y_ptr + row)
    dy = tl.load(dy_ptr + row).to(tl.float32)
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * N + cols, tl.exp(x - y) * dy, mask=mask)


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, y32 = logsumexp_forward(x)
        ctx.save_for_backward(x, y32)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y32 = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        N = x.shape[-1]
        BLOCK = min(512, triton.next_power_of_2(N))
        logsumexp_backward_kernel[(y32.numel(), triton.cdiv(N, BLOCK))](x, y32, dy, dx, N, BLOCK=BLOCK)
        return dx


def logsumexp_autograd(x):
    return LogSumExp.apply(x)
