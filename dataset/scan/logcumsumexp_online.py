"""Running log-sum-exp along time.

Forward    y_t = log sum_{s <= t} e^{x_s}
Backward   dx_s = sum_{t >= s} dy_t e^{x_s - y_t}.  The textbook form e^{x_s} revcumsum(dy e^{-y}) overflows,
           and dy has signs, so that it has no logarithm. But y never falls: with an r_s that is at least y_s
           and at most y_s + 1, and does not fall either,
           c_s = sum_{t >= s} dy_t e^{r_s - y_t} = dy_s e^{r_s - y_s} + e^{r_s - r_{s+1}} c_{s+1},
           dx_s = e^{x_s - r_s} c_s

Forward schedule: a program owns (batch, channel tile) and walks time with the maximum so far and the sum of
exponentials below it. y is the output, and all that is kept beside x.
Backward schedule: the same owner walks back with c, a sum that is always relative to about the current y. No
exponent is above 1: the decays take the place of a maximum for the way back, and a signed carry in the log
domain with its two logarithms a step is not needed. r stays where it is until y is 1 below it, and is set to
y then: its decays, of which every one rounds the whole sum, are few and otherwise exactly 1, where those of
y itself would be one a step. Channels lie side by side, so that loads coalesce.

op: logcumsumexp
schedule: reverse_scan, recompute_from_stats
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def logcumsumexp_kernel(x_ptr, y_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, x)
        total = total * tl.exp(m - m_new) + tl.exp(x - m_new)
        m = m_new
        tl.store(y_ptr + offs, m + tl.log(total), mask=mask)


@autodiff(inputs_require_grad=(0,))
def logcumsumexp(x):
    """x: (B, T, C); sums run along T."""
    x = x.contiguous()
    B, T, C = x.shape
    y = torch.empty_like(x)
    logcumsumexp_kernel[(triton.cdiv(C, 128), B)](x, y, T, C, BLOCK=128)
    return y


def reference(x):
    return torch.logcumsumexp(x, dim=1)


SWEEP = [{"B": 32, "T": 512, "C": 2048}, {"B": 3, "T": 2039, "C": 500}]
SWEEP_CPU = [{"B": 2, "T": 37, "C": 20}, {"B": 1, "T": 5, "C": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (3 * torch.randn(dims["B"], dims["T"], dims["C"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def logcumsumexp_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    c = tl.zeros([BLOCK], dtype=tl.float32)
    r = tl.load(y_ptr + (b * T + T - 1) * C + cols, mask=mask, other=0.0).to(tl.float32)
    for back in range(T):
        offs = (b * T + T - 1 - back) * C + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        later = r
        r = tl.where(later - y > 1, y, later)
        c = c * tl.exp(r - later) + dy * tl.exp(r - y)
        tl.store(dx_ptr + offs, tl.exp(x - r) * c, mask=mask)


class LogCumSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = logcumsumexp(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        B, T, C = x.shape
        dx = torch.empty_like(x)
        logcumsumexp_backward_kernel[(triton.cdiv(C, 128), B)](x, y, dy.contiguous(), dx, T, C, BLOCK=128)
        return dx


def logcumsumexp_autograd(x):
    return LogCumSumExp.apply(x)
