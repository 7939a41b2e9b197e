"""Diagonal linear recurrence over long sequences that are few: time is cut into chunks that run at once.

Forward    h_t = a_t * h_{t-1} + x_t,  h_{-1} = 0.  A chunk from t0 to t1 acts on the state before it as
           h_{t1} = p h_{t0-1} + e,  p = a_{t0} .. a_{t1},  e the chunk's last state if it begins with 0
Backward   g_t = dh_t + a_{t+1} g_{t+1},   dx_t = g_t,   da_t = g_t h_{t-1}.  With r_t = a_t g_t for
           what step t hands on to the left, r_t = a_t (dh_t + r_{t+1}), and a chunk acts in the same way:
           r_{t0} = p r_{t1+1} + e',  with the same p, and e' what it hands on if nothing comes from the right

Forward schedule: three kernels. Each (batch, chunk, channel tile) walks its chunk for (p, e); one owner a
channel walks these summaries, CHUNK times fewer than steps, for the state before each chunk; then every chunk
walks again from its true state and stores h.
Backward schedule: the same three phases from right to left, with the first two being the same kernels: r is a
recurrence whose decay a_t stands at the step itself and not, as that of g, at its right neighbour, so that a
chunk needs nothing from beyond its ends but one number. The last phase reads h_{t-1} from the output and
stores dx and da. A walk of T / CHUNK + CHUNK steps replaces one of T; the price is a second read of a and dh.

op: diag_linear_recurrence
schedule: reverse_scan, chunk_state_pass
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 64
BLOCK = 64


@triton.jit
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def summary_kernel(
    a_ptr, x_ptr, p_ptr, e_ptr, T, C, chunks, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """p and e of a chunk; with REVERSE x is dh, and e what the chunk hands on to the left."""
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    p = tl.full([BLOCK], 1.0, dtype=tl.float32)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    length = tl.minimum(CHUNK, T - c * CHUNK)
    for step in range(length):
        t = c * CHUNK + (length - 1 - step if REVERSE else step)
        offs = (b * T + t) * C + cols
        a, x = load_step(a_ptr, offs, mask), load_step(x_ptr, offs, mask)
        e = a * (e + x) if REVERSE else a * e + x
        p *= a
    tl.store(p_ptr + (b * chunks + c) * C + cols, p, mask=mask)
    tl.store(e_ptr + (b * chunks + c) * C + cols, e, mask=mask)


@triton.jit
def carry_kernel(p_ptr, e_ptr, carry_ptr, C, chunks, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The state before each chunk; with REVERSE what it is handed from the right."""
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(chunks):
        offs = (b * chunks + (chunks - 1 - step if REVERSE else step)) * C + cols
        tl.store(carry_ptr + offs, carry, mask=mask)
        carry = load_step(p_ptr, offs, mask) * carry + load_step(e_ptr, offs, mask)


@triton.jit
def states_kernel(a_ptr, x_ptr, carry_ptr, h_ptr, T, C, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    h = load_step(carry_ptr, (b * chunks + c) * C + cols, mask)
    for t in range(c * CHUNK, tl.minimum(c * CHUNK + CHUNK, T)):
        offs = (b * T + t) * C + cols
        h = load_step(a_ptr, offs, mask) * h + load_step(x_ptr, offs, mask)
        tl.store(h_ptr + offs, h.to(h_ptr.dtype.element_ty), mask=mask)


def launch_carries(a, x, reverse):
    (B, T, C), chunks, tiles = x.shape, triton.cdiv(x.shape[1], CHUNK), triton.cdiv(x.shape[2], BLOCK)
    p, e, carry = (torch.empty((B, chunks, C), device=x.device, dtype=torch.float32) for _ in range(3))
    summary_kernel[(tiles, chunks, B)](a, x, p, e, T, C, chunks, REVERSE=reverse, CHUNK=CHUNK, BLOCK=BLOCK)
    carry_kernel[(tiles, B)](p, e, carry, C, chunks, REVERSE=reverse, BLOCK=BLOCK)
    return carry


@autodiff(inputs_require_grad=(0, 1))
def diag_recurrence(a, x):
    """a, x: (B, T, C)."""
    if a.shape != x.shape:
        raise ValueError("a and x must have one shape")
    a, x = a.contiguous(), x.contiguous()
    (B, T, C), carry, h = x.shape, launch_carries(a, x, False), torch.empty_like(x)
    chunks = carry.shape[1]
    states_kernel[(triton.cdiv(C, BLOCK), chunks, B)](a, x, carry, h, T, C, chunks, CHUNK=CHUNK, BLOCK=BLOCK)
    return h


def reference(a, x):
    h, steps = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 2, "T": 4096, "C": 2048}, {"B": 1, "T": 2039, "C": 500}]
SWEEP_CPU = [{"B": 2, "T": 150, "C": 9}, {"B": 1, "T": 64, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    a = torch.sigmoid(2 + torch.randn(shape, device=device, dtype=dtype))
    return a, torch.randn(shape, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def gradients_kernel(
    a_ptr, h_ptr, dh_ptr, carry_ptr, da_ptr, dx_ptr, T, C, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    r = load_step(carry_ptr, (b * chunks + c) * C + cols, mask)  # r_{t+1}
    length = tl.minimum(CHUNK, T - c * CHUNK)
    for step in range(length):
        t = c * CHUNK + length - 1 - step
        offs = (b * T + t) * C + cols
        g = r + load_step(dh_ptr, offs, mask)
        before = load_step(h_ptr, offs - C, mask & (t > 0))
        tl.store(dx_ptr + offs, g.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(da_ptr + offs, (g * before).to(da_ptr.dtype.element_ty), mask=mask)
        r = load_step(a_ptr, offs, mask) * g


class DiagRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        a = a.contiguous()
        h = diag_recurrence(a, x)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        a, h = ctx.saved_tensors
        dh = dh.contiguous()
        (B, T, C), carry = h.shape, launch_carries(a, dh, True)
        da, dx, chunks = torch.empty_like(a), torch.empty_like(h), carry.shape[1]
        gradients_kernel[(triton.cdiv(C, BLOCK), chunks, B)](
            a, h, dh, carry, da, dx, T, C, chunks, CHUNK=CHUNK, BLOCK=BLOCK
        )
        return da if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None


def diag_recurrence_autograd(a, x):
    return DiagRecurrence.apply(a, x)
