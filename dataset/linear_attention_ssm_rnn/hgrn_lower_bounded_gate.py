"""Gated linear recurrence whose forget gate has a learned lower bound.

Forward    s_t = sigmoid(z_t),  f_t = lb + (1 - lb) s_t,  h_t = f_t h_{t-1} + (1 - f_t) i_t,  h_{-1} = 0
Backward   g_t = dh_t + f_{t+1} g_{t+1};  di_t = (1 - f_t) g_t;  df_t = g_t (h_{t-1} - i_t);
           dz_t = df_t (1 - lb) s_t (1 - s_t);  dlb_c = sum over batch and time of df_t (1 - s_t)

Forward schedule: a program owns (batch, channel tile) and walks time; the gates live in registers only.
Backward schedule: the same owner in reverse; the gate is rebuilt from z, since a sigmoid is cheaper than a
saved tensor. dlb is summed over time in registers, stored as one row a batch element, and a second kernel
adds the rows.

op: hgrn
schedule: reverse_scan, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def hgrn_kernel(z_ptr, i_ptr, lb_ptr, h_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    lb = tl.load(lb_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        f = lb + (1 - lb) * tl.sigmoid(tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        h = f * h + (1 - f) * tl.load(i_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def hgrn(z, i, lb):
    """z, i: (B, T, C); lb: (C), between 0 and 1."""
    z, i, lb = z.contiguous(), i.contiguous(), lb.contiguous()
    B, T, C = z.shape
    h = torch.empty_like(i)
    hgrn_kernel[(triton.cdiv(C, 64), B)](z, i, lb, h, T, C, BLOCK=64)
    return h


def reference(z, i, lb):
    f = lb + (1 - lb) * torch.sigmoid(z)
    h, steps = torch.zeros_like(i[:, 0]), []
    for t in range(i.shape[1]):
        h = f[:, t] * h + (1 - f[:, t]) * i[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [
    {"B": 8, "T": 2048, "C": 2048},
    {"B": 16, "T": 1024, "C": 1024},
    {"B": 3, "T": 2003, "C": 1001},
]
SWEEP_CPU = [{"B": 2, "T": 31, "C": 28}, {"B": 3, "T": 4, "C": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    z, i = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return z, i, 0.8 * torch.rand(dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def hgrn_backward_kernel(
    z_ptr, i_ptr, lb_ptr, h_ptr, dh_ptr, dz_ptr, di_ptr, part_ptr, T, C, BLOCK: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    lb = tl.load(lb_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # f_{t+1} g_{t+1}
    dlb = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(T):
        t = T - 1 - step
        offs = (b * T + t) * C + cols
        s = tl.sigmoid(tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        f = lb + (1 - lb) * s
        g = carry + tl.load(dh_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(h_ptr + offs - C, mask=mask & (t > 0), other=0.0).to(tl.float32)
        df = g * (before - tl.load(i_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        tl.store(di_ptr + offs, (1 - f) * g, mask=mask)
        tl.store(dz_ptr + offs, df * (1 - lb) * s * (1 - s), mask=mask)
        dlb += df * (1 - s)
        carry = f * g
    tl.store(part_ptr + b * C + cols, dlb, mask=mask)


@triton.jit
def batch_sum_kernel(part_ptr, dlb_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dlb = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        dlb += tl.load(part_ptr + b * C + cols, mask=cols < C, other=0.0)
    tl.store(dlb_ptr + cols, dlb, mask=cols < C)


class HGRN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, i, lb):
        z, i, lb = z.contiguous(), i.contiguous(), lb.contiguous()
        h = hgrn(z, i, lb)
        ctx.save_for_backward(z, i, lb, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        z, i, lb, h = ctx.saved_tensors
        dh = dh.contiguous()
        B, T, C = z.shape
        dz, di, dlb = torch.empty_like(z), torch.empty_like(i), torch.empty_like(lb)
        part = torch.empty((B, C), device=z.device, dtype=torch.float32)
        hgrn_backward_kernel[(triton.cdiv(C, 64), B)](z, i, lb, h, dh, dz, di, part, T, C, BLOCK=64)
        if ctx.needs_input_grad[2]:
            batch_sum_kernel[(triton.cdiv(C, 64),)](part, dlb, B, C, BLOCK=64)
        return tuple(
            g if needed else None for g, needed in zip((dz, di, dlb), ctx.needs_input_grad, strict=True)
        )


def hgrn_autograd(z, i, lb):
    return HGRN.apply(z, i, lb)
