"""Diagonal linear recurrence with time as the fast axis: a whole row is one parallel scan.

Forward    h_t = a_t h_{t-1} + x_t,  h_{-1} = 0.  A step is the map h -> a h + x, and two in turn
           are one:   (a, x) then (b, y)  =  (a b, b x + y),  which is associative
Backward   g_t = dh_t + a_{t+1} g_{t+1}: the same scan of (a_{t+1}, dh_t) from the right;
           dx_t = g_t,   da_t = g_t h_{t-1}

Forward schedule: a program owns a row and scans all its steps in one tile, in log T rounds in place of T
steps; channels are apart in memory, so that lanes along time are the ones whose loads coalesce. It stores h
and nothing else.
Backward schedule: the same tile and the same scan in reverse. The decay of step t is that of its right
neighbour, so a is loaded a second time, one place further on, instead of moving lanes; past the row it is 0.
h_{t-1} is the output, loaded one place back. A carry along time never leaves the registers, at the price of
rows that fit a tile.

op: diag_linear_recurrence
schedule: reverse_scan
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def compose(a, x, b, y):
    """The step (a, x), then the step (b, y)."""
    return a * b, b * x + y


@triton.jit
def recurrence_kernel(a_ptr, x_ptr, h_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * T
    t = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row + t, mask=t < T, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row + t, mask=t < T, other=0.0).to(tl.float32)
    _, h = tl.associative_scan((a, x), 0, compose)
    tl.store(h_ptr + row + t, h.to(h_ptr.dtype.element_ty), mask=t < T)


@autodiff(inputs_require_grad=(0, 1))
def row_recurrence(a, x):
    """a, x: (..., T)."""
    a, x = a.contiguous(), x.contiguous()
    T = x.shape[-1]
    if a.shape != x.shape:
        raise ValueError("a and x must have one shape")
    if T > 16384:
        raise ValueError(f"a row of {T} does not fit one tile")
    h = torch.empty_like(x)
    recurrence_kernel[(x.numel() // T,)](a, x, h, T, BLOCK=triton.next_power_of_2(T))
    return h


def reference(a, x):
    h, steps = torch.zeros_like(x[..., 0]), []
    for t in range(x.shape[-1]):
        h = a[..., t] * h + x[..., t]
        steps.append(h)
    return torch.stack(steps, dim=-1)


SWEEP = [{"M": 8192, "T": 1024}, {"M": 1021, "T": 1500}]
SWEEP_CPU = [{"M": 5, "T": 37}, {"M": 2, "T": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.sigmoid(2 + torch.randn(dims["M"], dims["T"], device=device, dtype=dtype))
    return a, torch.randn_like(a)


# ---- backward ----


@triton.jit
def recurrence_backward_kernel(a_ptr, h_ptr, dh_ptr, da_ptr, dx_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * T
    t = tl.arange(0, BLOCK)
    following = tl.load(a_ptr + row + t + 1, mask=t < T - 1, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row + t, mask=t < T, other=0.0).to(tl.float32)
    _, g = tl.associative_scan((following, dh), 0, compose, reverse=True)
    before = tl.load(h_ptr + row + t - 1, mask=(t > 0) & (t < T), other=0.0).to(tl.float32)
    tl.store(dx_ptr + row + t, g.to(dx_ptr.dtype.element_ty), mask=t < T)
    tl.store(da_ptr + row + t, (g * before).to(da_ptr.dtype.element_ty), mask=t < T)


class RowRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        a = a.contiguous()
        h = row_recurrence(a, x)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        a, h = ctx.saved_tensors
        T, da, dx = h.shape[-1], torch.empty_like(a), torch.empty_like(h)
        BLOCK = triton.next_power_of_2(T)
        recurrence_backward_kernel[(h.numel() // T,)](a, h, dh.contiguous(), da, dx, T, BLOCK=BLOCK)
        return da if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None


def row_recurrence_autograd(a, x):
    return RowRecurrence.apply(a, x)
