"""A state-space recurrence by the trapezoidal rule: each step weighs its own input and the one before.

Forward    a_t = e^{-dt_t r},  r = e^{l},
           h_t = a_t h_{t-1} + (1 - m_t) dt_t a_t u_{t-1} + m_t dt_t u_t,   h_{-1} = u_{-1} = 0
           (per channel; l the logarithm of its rate; m = 1 is the usual rule, m = 1/2 the trapezoid)
Backward   with g_t = dh_t + a_{t+1} g_{t+1}, and  b_t = (1 - m_t) dt_t a_t  the weight of the earlier input:
           du_t = m_t dt_t g_t + b_{t+1} g_{t+1},   dm_t = g_t dt_t (u_t - a_t u_{t-1}),
           da_t = g_t (h_{t-1} + (1 - m_t) dt_t u_{t-1}),
           ddt_t = g_t (m_t u_t + (1 - m_t) a_t u_{t-1}) - r a_t da_t,
           dl = -r sum over batch and time of dt_t a_t da_t

Forward schedule: a program owns (batch, channel tile) and walks time with h and the last u in registers: the
second tap costs no load. Done as a convolution before a plain scan, its result would be stored and read.
Backward schedule: the same owner in reverse carries two numbers to the left, a g for the state and b g for
the input: u_t gets one part at its own step and one from the step after, and they meet in a register before
the store, where a scatter of the second tap would write du twice. h_{t-1} is an output; a is made again.
dl adds up in registers over time, a row a batch element, and a second kernel adds the rows.

op: trapezoid_recurrence
schedule: reverse_scan, gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_C = 64


@triton.jit
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_step(ptr, value, offs, mask):
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def trapezoid_kernel(u_ptr, dt_ptr, m_ptr, log_rate_ptr, h_ptr, T, C, BLOCK_C: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    first = tl.program_id(1).to(tl.int64) * T * C + cols
    rate = tl.exp(load_step(log_rate_ptr, cols, mask))
    h = tl.zeros([BLOCK_C], dtype=tl.float32)
    before = tl.zeros([BLOCK_C], dtype=tl.float32)
    for t in range(T):
        offs = first + t * C
        u, dt, m = load_step(u_ptr, offs, mask), load_step(dt_ptr, offs, mask), load_step(m_ptr, offs, mask)
        h = tl.exp(-dt * rate) * (h + (1 - m) * dt * before) + m * dt * u
        before = u
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def trapezoid_recurrence(u, dt, m, log_rate):
    """u, dt, m: (B, T, C), dt > 0 and m in (0, 1); log_rate: (C). Gives h, (B, T, C) in float32."""
    u, dt, m, log_rate = u.contiguous(), dt.contiguous(), m.contiguous(), log_rate.contiguous()
    B, T, C = u.shape
    if not u.shape == dt.shape == m.shape or log_rate.shape != (C,):
        raise ValueError("u, dt and m must have one shape, and log_rate one number a channel")
    h = torch.empty(u.shape, device=u.device, dtype=torch.float32)
    trapezoid_kernel[(triton.cdiv(C, BLOCK_C), B)](u, dt, m, log_rate, h, T, C, BLOCK_C=BLOCK_C)
    return h


def reference(u, dt, m, log_rate):
    dtype = torch.promote_types(u.dtype, torch.float32)
    u, dt, m = u.to(dtype), dt.to(dtype), m.to(dtype)
    a = torch.exp(-dt * log_rate.to(dtype).exp())
    before = torch.nn.functional.pad(u, (0, 0, 1, 0))[:, :-1]
    x = (1 - m) * dt * a * before + m * dt * u
    h, steps = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = a[:, t] * h + x[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 8, "T": 2048, "C": 2048}, {"B": 3, "T": 4001, "C": 1000}]
SWEEP_CPU = [{"B": 2, "T": 21, "C": 70}, {"B": 3, "T": 16, "C": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    u, m = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    dt = torch.rand(shape, device=device, dtype=dtype) * 0.3 + 0.01
    return u, dt, torch.sigmoid(m), 0.5 * torch.randn(dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def trapezoid_backward_kernel(
    u_ptr, dt_ptr, m_ptr, log_rate_ptr, h_ptr, dh_ptr, du_ptr, ddt_ptr, dm_ptr, part_ptr, T, C,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    first = batch * T * C + cols
    rate = tl.exp(load_step(log_rate_ptr, cols, mask))
    to_state = tl.zeros([BLOCK_C], dtype=tl.float32)  # a g of the step after
    to_input = tl.zeros([BLOCK_C], dtype=tl.float32)  # b g of the step after
    drate = tl.zeros([BLOCK_C], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = first + t * C
        u, dt, m = load_step(u_ptr, offs, mask), load_step(dt_ptr, offs, mask), load_step(m_ptr, offs, mask)
        u_before = load_step(u_ptr, offs - C, mask & (t > 0))
        h_before = load_step(h_ptr, offs - C, mask & (t > 0))
        a = tl.exp(-dt * rate)
        g = load_step(dh_ptr, offs, mask) + to_state
        store_step(du_ptr, m * dt * g + to_input, offs, mask)
        store_step(dm_ptr, g * dt * (u - a * u_before), offs, mask)
        da = g * (h_before + (1 - m) * dt * u_before)
        store_step(ddt_ptr, g * (m * u + (1 - m) * a * u_before) - rate * a * da, offs, mask)
        drate -= dt * a * da
        to_state = a * g
        to_input = (1 - m) * dt * a * g
    tl.store(part_ptr + batch * C + cols, drate, mask=mask)


@triton.jit
def dlog_rate_kernel(part_ptr, log_rate_ptr, out_ptr, B, C, BLOCK_C: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    drate = tl.zeros([BLOCK_C], dtype=tl.float32)
    for b in range(B):
        drate += tl.load(part_ptr + b * C + cols, mask=mask, other=0.0)
    store_step(out_ptr, tl.exp(load_step(log_rate_ptr, cols, mask)) * drate, cols, mask)


class TrapezoidRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, dt, m, log_rate):
        u, dt, m, log_rate = u.contiguous(), dt.contiguous(), m.contiguous(), log_rate.contiguous()
        h = trapezoid_recurrence(u, dt, m, log_rate)
        ctx.save_for_backward(u, dt, m, log_rate, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        u, dt, m, log_rate, h = ctx.saved_tensors
        (B, T, C), tiles = u.shape, triton.cdiv(u.shape[2], BLOCK_C)
        du, ddt, dm, dlog_rate = (torch.empty_like(tensor) for tensor in (u, dt, m, log_rate))
        part = torch.empty((B, C), device=u.device, dtype=torch.float32)
        trapezoid_backward_kernel[(tiles, B)](
            u, dt, m, log_rate, h, dh.contiguous(), du, ddt, dm, part, T, C, BLOCK_C=BLOCK_C
        )
        if ctx.needs_input_grad[3]:
            dlog_rate_kernel[(tiles,)](part, log_rate, dlog_rate, B, C, BLOCK_C=BLOCK_C)
        grads = zip((du, ddt, dm, dlog_rate), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def trapezoid_recurrence_autograd(u, dt, m, log_rate):
    return TrapezoidRecurrence.apply(u, dt, m, log_rate)
