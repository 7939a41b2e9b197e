"""Exponential moving average with a learned decay per channel.

Forward    h_t = a_c h_{t-1} + (1 - a_c) x_t,  h_{-1} = 0
Backward   g_t = dh_t + a_c g_{t+1};  dx_t = (1 - a_c) g_t;
           da_c = sum over batch and time of g_t (h_{t-1} - x_t)

Forward schedule: a program owns (batch, channel tile) and walks time.
Backward schedule: the same owner walks time in reverse and keeps da of its batch element in registers. It
stores one row of a [B, C] buffer, and a second kernel adds the B rows: time, the long axis, is summed for
free on the way.

op: ema
schedule: reverse_scan, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def ema_kernel(x_ptr, a_ptr, h_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    a = tl.load(a_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        h = a * h + (1 - a) * tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def ema(x, a):
    """x: (B, T, C); a: (C), between 0 and 1."""
    x, a = x.contiguous(), a.contiguous()
    B, T, C = x.shape
    h = torch.empty_like(x)
    ema_kernel[(triton.cdiv(C, 64), B)](x, a, h, T, C, BLOCK=64)
    return h


def reference(x, a):
    h, steps = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [
    {"B": 8, "T": 2048, "C": 2048},
    {"B": 16, "T": 1024, "C": 1024},
    {"B": 3, "T": 2003, "C": 1001},
]
SWEEP_CPU = [{"B": 4, "T": 33, "C": 26}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["C"], device=device, dtype=dtype)
    return x, 0.5 + 0.4 * torch.rand(dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def ema_backward_kernel(x_ptr, a_ptr, h_ptr, dh_ptr, dx_ptr, part_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    a = tl.load(a_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.zeros([BLOCK], dtype=tl.float32)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(T):
        t = T - 1 - step
        offs = (b * T + t) * C + cols
        g = a * g + tl.load(dh_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(h_ptr + offs - C, mask=mask & (t > 0), other=0.0).to(tl.float32)
        da += g * (before - tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        tl.store(dx_ptr + offs, (1 - a) * g, mask=mask)
    tl.store(part_ptr + b * C + cols, da, mask=mask)


@triton.jit
def batch_sum_kernel(part_ptr, da_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        da += tl.load(part_ptr + b * C + cols, mask=cols < C, other=0.0)
    tl.store(da_ptr + cols, da, mask=cols < C)


class EMA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        x, a = x.contiguous(), a.contiguous()
        h = ema(x, a)
        ctx.save_for_backward(x, a, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        x, a, h = ctx.saved_tensors
        dh = dh.contiguous()
        B, T, C = x.shape
        dx, da = torch.empty_like(x), torch.empty_like(a)
        part = torch.empty((B, C), device=x.device, dtype=torch.float32)
        ema_backward_kernel[(triton.cdiv(C, 64), B)](x, a, h, dh, dx, part, T, C, BLOCK=64)
        batch_sum_kernel[(triton.cdiv(C, 64),)](part, da, B, C, BLOCK=64)
        return dx if ctx.needs_input_grad[0] else None, da if ctx.needs_input_grad[1] else None


def ema_autograd(x, a):
    return EMA.apply(x, a)
