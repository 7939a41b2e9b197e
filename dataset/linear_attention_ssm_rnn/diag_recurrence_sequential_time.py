"""Diagonal linear recurrence with a gate per step.

Forward    h_t = a_t * h_{t-1} + x_t,  h_{-1} = h0
Backward   with g_t = dL/dh_t along all paths:  g_t = dh_t + a_{t+1} g_{t+1},
           dx_t = g_t,  da_t = g_t * h_{t-1},  dh0 = a_0 g_0

Forward schedule: a program owns (batch, channel tile) and walks time; every h is an output, so nothing
extra is stored.
Backward schedule: the same owner walks time in reverse with a_{t+1} g_{t+1} in registers. Each step reads
dh, a and h_{t-1} once and writes dx and da once; channels are contiguous, so every access is coalesced.

op: diag_linear_recurrence
schedule: reverse_scan
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def recurrence_kernel(a_ptr, x_ptr, h0_ptr, h_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    h = tl.load(h0_ptr + b * C + cols, mask=mask, other=0.0).to(tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        h = a * h + tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def diag_recurrence(a, x, h0):
    """a, x: (B, T, C); h0: (B, C)."""
    a, x, h0 = a.contiguous(), x.contiguous(), h0.contiguous()
    B, T, C = x.shape
    h = torch.empty_like(x)
    recurrence_kernel[(triton.cdiv(C, 64), B)](a, x, h0, h, T, C, BLOCK=64)
    return h


def reference(a, x, h0):
    h, steps = h0, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [
    {"B": 8, "T": 2048, "C": 2048},
    {"B": 16, "T": 1024, "C": 1024},
    {"B": 3, "T": 2003, "C": 1001},
]
SWEEP_CPU = [{"B": 2, "T": 37, "C": 50}, {"B": 1, "T": 6, "C": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C = dims["B"], dims["T"], dims["C"]
    a = torch.rand(B, T, C, device=device, dtype=dtype)
    return a, torch.randn(B, T, C, device=device, dtype=dtype), torch.randn(B, C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def recurrence_backward_kernel(
    a_ptr, h_ptr, h0_ptr, dh_ptr, da_ptr, dx_ptr, dh0_ptr, T, C, BLOCK: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    h0 = tl.load(h0_ptr + b * C + cols, mask=mask, other=0.0).to(tl.float32)
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # a_{t+1} g_{t+1}
    for step in range(T):
        t = T - 1 - step
        offs = (b * T + t) * C + cols
        g = carry + tl.load(dh_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(h_ptr + offs - C, mask=mask & (t > 0), other=0.0).to(tl.float32)
        before = tl.where(t > 0, before, h0)
        tl.store(dx_ptr + offs, g, mask=mask)
        tl.store(da_ptr + offs, g * before, mask=mask)
        carry = g * tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dh0_ptr + b * C + cols, carry, mask=mask)


class DiagRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, h0):
        a, h0 = a.contiguous(), h0.contiguous()
        h = diag_recurrence(a, x, h0)
        ctx.save_for_backward(a, h, h0)
        return h

    @staticmethod
    def backward(ctx, dh):
        a, h, h0 = ctx.saved_tensors
        dh = dh.contiguous()
        B, T, C = h.shape
        grads = torch.empty_like(a), torch.empty_like(h), torch.empty_like(h0)
        recurrence_backward_kernel[(triton.cdiv(C, 64), B)](a, h, h0, dh, *grads, T, C, BLOCK=64)
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def diag_recurrence_autograd(a, x, h0):
    return DiagRecurrence.apply(a, x, h0)
