"""Diagonal recurrence whose states are read out and thrown away: kept every K steps, made again in between.

Forward    h_t = a_t * h_{t-1} + x_t,  h_{-1} = 0,   y_t = c_t * h_t
Backward   with G_t = c_t dy_t + a_{t+1} G_{t+1}, the gradient of h_t along all paths:
           dc_t = dy_t h_t,   dx_t = G_t,   da_t = G_t h_{t-1}

Forward schedule: a program owns (batch, channel tile) and walks time. y is all that leaves it: where the
states themselves are the output they are at hand in the backward, here they would be one more tensor of the
size of x, kept for the backward alone. So only the state before every SPAN-th step is stored.
Backward schedule: the same owner takes the spans from last to first. Each is walked forward from its
checkpoint, which leaves the SPAN states before its steps in a scratch of the program, small enough to stay in
cache, and then backward with a G in registers. That reads a and x once more, and saves a write and a read of
all states; to recover h_{t-1} as (h_t - x_t) / a_t would fail where a gate is shut. Barriers stand between
the walks, for the lane that reads a number need not be the one that wrote it.

op: diag_recurrence_readout
schedule: reverse_scan, chunk_state_pass, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_C = 64
SPAN = 32


@triton.jit
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_step(ptr, value, offs, mask):
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def readout_kernel(
    a_ptr, x_ptr, c_ptr, y_ptr, saved_ptr, T, C, spans, SPAN: tl.constexpr, BLOCK_C: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    h = tl.zeros([BLOCK_C], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            tl.store(saved_ptr + (batch * spans + t // SPAN) * C + cols, h, mask=mask)
        offs = (batch * T + t) * C + cols
        h = load_step(a_ptr, offs, mask) * h + load_step(x_ptr, offs, mask)
        store_step(y_ptr, load_step(c_ptr, offs, mask) * h, offs, mask)


def readout_forward(a, x, c):
    B, T, C = x.shape
    if not a.shape == x.shape == c.shape:
        raise ValueError("a, x and c must have one shape")
    spans, y = triton.cdiv(T, SPAN), torch.empty_like(x)
    saved = torch.empty((B, spans, C), device=x.device, dtype=torch.float32)
    readout_kernel[(triton.cdiv(C, BLOCK_C), B)](a, x, c, y, saved, T, C, spans, SPAN=SPAN, BLOCK_C=BLOCK_C)
    return y, saved


@autodiff(inputs_require_grad=(0, 1, 2))
def diag_readout(a, x, c):
    """a, x, c: (B, T, C), decays, inputs and output gates."""
    return readout_forward(a.contiguous(), x.contiguous(), c.contiguous())[0]


def reference(a, x, c):
    h, steps = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        steps.append(c[:, t] * h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 8, "T": 4096, "C": 2048}, {"B": 2, "T": 8191, "C": 1000}]
SWEEP_CPU = [{"B": 2, "T": 41, "C": 24}, {"B": 1, "T": 32, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    a, x, c = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return torch.sigmoid(a + 2), x, c


# ---- backward ----


@triton.jit
def readout_backward_kernel(
    a_ptr, x_ptr, c_ptr, saved_ptr, dy_ptr, scratch_ptr, da_ptr, dx_ptr, dc_ptr, T, C, spans,
    SPAN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    scratch = scratch_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * SPAN * BLOCK_C
    scratch += tl.arange(0, BLOCK_C)
    carry = tl.zeros([BLOCK_C], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        h = tl.load(saved_ptr + (batch * spans + start // SPAN) * C + cols, mask=mask, other=0.0)
        for i in range(length):
            tl.store(scratch + i * BLOCK_C, h)
            offs = (batch * T + start + i) * C + cols
            h = load_step(a_ptr, offs, mask) * h + load_step(x_ptr, offs, mask)
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            offs = (batch * T + start + i) * C + cols
            before, a = tl.load(scratch + i * BLOCK_C), load_step(a_ptr, offs, mask)
            dy = load_step(dy_ptr, offs, mask)
            h = a * before + load_step(x_ptr, offs, mask)
            store_step(dc_ptr, dy * h, offs, mask)
            G = load_step(c_ptr, offs, mask) * dy + carry
            store_step(dx_ptr, G, offs, mask)
            store_step(da_ptr, G * before, offs, mask)
            carry = a * G
        tl.debug_barrier()  # and the next span overwrites it


class DiagReadout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, c):
        a, x, c = a.contiguous(), x.contiguous(), c.contiguous()
        y, saved = readout_forward(a, x, c)
        ctx.save_for_backward(a, x, c, saved)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, x, c, saved = ctx.saved_tensors
        (B, T, C), tiles, spans = x.shape, triton.cdiv(x.shape[2], BLOCK_C), saved.shape[1]
        grads = tuple(torch.empty_like(tensor) for tensor in (a, x, c))
        scratch = saved.new_empty((B, tiles, SPAN, BLOCK_C))
        readout_backward_kernel[(tiles, B)](
            a, x, c, saved, dy.contiguous(), scratch, *grads, T, C, spans, SPAN=SPAN, BLOCK_C=BLOCK_C
        )
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def diag_readout_autograd(a, x, c):
    return DiagReadout.apply(a, x, c)
