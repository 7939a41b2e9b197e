"""Diagonal linear recurrence over packed sequences, each with a state it begins with and one it ends with.

Forward    per sequence, h0 the state it is given:  h_t = a_t * h_{t-1} + x_t over its span,  h_end its last
           state, or h0 itself where the span is empty
Backward   with r the gradient that reaches a state from the right, r = dh_end at the end of the span:
           g_t = dh_t + r,   dx_t = g_t,   da_t = g_t h_{t-1},   then r = a_t g_t;   dh0 = what is left of r

Forward schedule: a program owns (sequence, channel tile) and walks the span between two offsets. Nothing is
padded, and no reset is tested for inside the loop: it is the loop that ends. Sequences of any length, also 0.
Backward schedule: the same owner walks its span back with r in registers. The last state is an output and has
a gradient of its own, which is where r begins: so a sequence may be cut into pieces that are trained one
after another, and an empty span hands dh_end on to h0 by the same code. Every gradient belongs to (sequence,
channel), so that each is stored once.

op: diag_recurrence_varlen
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
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def recurrence_kernel(a_ptr, x_ptr, h0_ptr, offsets_ptr, h_ptr, end_ptr, C, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    h = load_step(h0_ptr, sequence * C + cols, mask)
    for t in range(tl.load(offsets_ptr + sequence), tl.load(offsets_ptr + sequence + 1)):
        offs = t * C + cols
        h = load_step(a_ptr, offs, mask) * h + load_step(x_ptr, offs, mask)
        tl.store(h_ptr + offs, h.to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(end_ptr + sequence * C + cols, h.to(end_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def varlen_recurrence(a, x, h0, offsets):
    """a, x: (tokens, C); h0: (sequences, C); offsets: int64 (sequences + 1), from 0 to tokens, rising.
    Gives h, like x, and the last states, like h0."""
    a, x, h0 = a.contiguous(), x.contiguous(), h0.contiguous()
    S, C = h0.shape
    if a.shape != x.shape or x.shape[1] != C or offsets.shape != (S + 1,):
        raise ValueError(
            "a and x must have one shape, h0 their channels, and offsets one number more than h0"
        )
    h, end = torch.empty_like(x), torch.empty_like(h0)
    recurrence_kernel[(S, triton.cdiv(C, 64))](a, x, h0, offsets, h, end, C, BLOCK=64)
    return h, end


def reference(a, x, h0, offsets):
    steps, ends = [x[:0]], []
    for sequence, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        h = h0[sequence]
        for t in range(begin, end):
            h = a[t] * h + x[t]
            steps.append(h[None])
        ends.append(h)
    return torch.cat(steps), torch.stack(ends)


SWEEP = [
    {"L0": 500, "L1": 1024, "L2": 3, "L3": 700, "C": 2048},
    {"L0": 0, "L1": 333, "L2": 80, "L3": 1, "C": 500},
]
SWEEP_CPU = [
    {"L0": 4, "L1": 0, "L2": 19, "L3": 11, "C": 33},
    {"L0": 0, "L1": 7, "L2": 1, "L3": 2, "C": 70},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.tensor([dims[f"L{i}"] for i in range(4)], device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shape = (sum(dims[f"L{i}"] for i in range(4)), dims["C"])
    a = torch.sigmoid(2 + torch.randn(shape, device=device, dtype=dtype))
    x, h0 = (
        torch.randn(shape, device=device, dtype=dtype),
        torch.randn(4, dims["C"], device=device, dtype=dtype),
    )
    return a, x, h0, offsets


# ---- backward ----


@triton.jit
def recurrence_backward_kernel(
    a_ptr, h_ptr, h0_ptr, offsets_ptr, dh_ptr, dend_ptr, da_ptr, dx_ptr, dh0_ptr, C, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    begin, end = tl.load(offsets_ptr + sequence), tl.load(offsets_ptr + sequence + 1)
    h0 = load_step(h0_ptr, sequence * C + cols, mask)
    r = load_step(dend_ptr, sequence * C + cols, mask)
    for step in range(end - begin):
        t = end - 1 - step
        offs = t * C + cols
        g = r + load_step(dh_ptr, offs, mask)
        before = tl.where(t > begin, load_step(h_ptr, offs - C, mask & (t > begin)), h0)
        tl.store(dx_ptr + offs, g.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(da_ptr + offs, (g * before).to(da_ptr.dtype.element_ty), mask=mask)
        r = load_step(a_ptr, offs, mask) * g
    tl.store(dh0_ptr + sequence * C + cols, r.to(dh0_ptr.dtype.element_ty), mask=mask)


class VarlenRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, h0, offsets):
        a, h0 = a.contiguous(), h0.contiguous()
        h, end = varlen_recurrence(a, x, h0, offsets)
        ctx.save_for_backward(a, h, h0, offsets)
        return h, end

    @staticmethod
    def backward(ctx, dh, dend):
        a, h, h0, offsets = ctx.saved_tensors
        (S, C), grads = h0.shape, tuple(torch.empty_like(tensor) for tensor in (a, h, h0))
        recurrence_backward_kernel[(S, triton.cdiv(C, 64))](
            a, h, h0, offsets, dh.contiguous(), dend.contiguous(), *grads, C, BLOCK=64
        )
        needs = ctx.needs_input_grad[:3]
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None


def varlen_recurrence_autograd(a, x, h0, offsets):
    return VarlenRecurrence.apply(a, x, h0, offsets)
