"""Bidirectional gated scan: one recurrence from each end with the same gates, added up.

Forward    f_t = a_t * f_{t-1} + x_t,   b_t = a_t * b_{t+1} + x_t,  f_{-1} = b_T = 0,   y_t = f_t + b_t
Backward   both halves have dy as their upstream; the adjoint of each runs against its own direction:
           p_t = dy_t + a_{t+1} p_{t+1}  for f,   q_t = dy_t + a_{t-1} q_{t-1}  for b;
           dx_t = p_t + q_t,   da_t = p_t f_{t-1} + q_t b_{t+1}

Forward schedule: a program owns (batch, channel tile) and walks time twice. The walk from the left stores f,
the walk from the right reads it, adds its own state and stores y. A barrier parts the walks, as the lane that
reads a number need not be the one that wrote it. f and b are kept in float32: y, their sum, cannot be taken
apart again.
Backward schedule: the same owner with the two walks exchanged: from the right p, then from the left q. The
gates and x are read by both halves, and their gradients are sums of two terms that are born at opposite ends
of time: the first walk leaves p and p f in scratch, the second adds its own and stores each gradient once.
Two kernels, one a half, would do the same traffic with one launch more; two programs on one address would
need atomics.

op: bidirectional_scan
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
def scan_kernel(a_ptr, x_ptr, y_ptr, f_ptr, b_ptr, T, C, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    f = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (batch * T + t) * C + cols
        f = load_step(a_ptr, offs, mask) * f + load_step(x_ptr, offs, mask)
        tl.store(f_ptr + offs, f, mask=mask)
    tl.debug_barrier()  # the second walk reads what the first stored
    b = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        offs = (batch * T + T - 1 - back) * C + cols
        b = load_step(a_ptr, offs, mask) * b + load_step(x_ptr, offs, mask)
        tl.store(b_ptr + offs, b, mask=mask)
        y = load_step(f_ptr, offs, mask) + b
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def scan_forward(a, x):
    if a.shape != x.shape:
        raise ValueError("a and x must have one shape")
    B, T, C = x.shape
    y = torch.empty_like(x)
    f, b = (torch.empty(x.shape, device=x.device, dtype=torch.float32) for _ in range(2))
    scan_kernel[(triton.cdiv(C, 64), B)](a, x, y, f, b, T, C, BLOCK=64)
    return y, f, b


@autodiff(inputs_require_grad=(0, 1))
def bidirectional_scan(a, x):
    """a, x: (B, T, C)."""
    return scan_forward(a.contiguous(), x.contiguous())[0]


def reference(a, x):
    f, b, left, right = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), [], []
    for t in range(x.shape[1]):
        f = a[:, t] * f + x[:, t]
        left.append(f)
    for t in reversed(range(x.shape[1])):
        b = a[:, t] * b + x[:, t]
        right.append(b)
    return torch.stack(left, dim=1) + torch.stack(right[::-1], dim=1)


SWEEP = [{"B": 16, "T": 784, "C": 768}, {"B": 3, "T": 1021, "C": 500}]
SWEEP_CPU = [{"B": 2, "T": 23, "C": 20}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    a = torch.sigmoid(2 + torch.randn(shape, device=device, dtype=dtype))
    return a, torch.randn(shape, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def scan_backward_kernel(
    a_ptr, f_ptr, b_ptr, dy_ptr, p_ptr, pf_ptr, da_ptr, dx_ptr, T, C, BLOCK: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # a_{t+1} p_{t+1}
    for back in range(T):
        t = T - 1 - back
        offs = (batch * T + t) * C + cols
        p = carry + load_step(dy_ptr, offs, mask)
        tl.store(p_ptr + offs, p, mask=mask)
        tl.store(pf_ptr + offs, p * load_step(f_ptr, offs - C, mask & (t > 0)), mask=mask)
        carry = load_step(a_ptr, offs, mask) * p
    tl.debug_barrier()  # the second walk reads what the first stored
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # a_{t-1} q_{t-1}
    for t in range(T):
        offs = (batch * T + t) * C + cols
        q = carry + load_step(dy_ptr, offs, mask)
        dx = load_step(p_ptr, offs, mask) + q
        da = load_step(pf_ptr, offs, mask) + q * load_step(b_ptr, offs + C, mask & (t < T - 1))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)
        carry = load_step(a_ptr, offs, mask) * q


class BidirectionalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        a, x = a.contiguous(), x.contiguous()
        y, f, b = scan_forward(a, x)
        ctx.save_for_backward(a, f, b)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, f, b = ctx.saved_tensors
        dy = dy.contiguous()
        B, T, C = a.shape
        da, dx, p, pf = torch.empty_like(a), torch.empty_like(dy), torch.empty_like(f), torch.empty_like(f)
        scan_backward_kernel[(triton.cdiv(C, 64), B)](a, f, b, dy, p, pf, da, dx, T, C, BLOCK=64)
        return da if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None


def bidirectional_scan_autograd(a, x):
    return BidirectionalScan.apply(a, x)
