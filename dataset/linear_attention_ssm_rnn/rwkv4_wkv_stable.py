"""The mixing of RWKV-4: a decayed weighted mean along time, with a bonus for the current token.

Forward    a_t = e^w a_{t-1} + e^{k_t} v_t,  b_t = e^w b_{t-1} + e^{k_t};   d_t = log(b_{t-1} + e^{u + k_t}),
           y_t = (a_{t-1} + e^{u + k_t} v_t) e^{-d_t}         (per channel, w < 0 and u fixed)
Backward   with c_t = e^{u + k_t - d_t} the share of the current token, and A, B the gradients of a_t and b_t
           from later outputs:
           A_{t-1} = e^w A_t + e^{-d_t} dy_t,   B_{t-1} = e^w B_t - e^{-d_t} dy_t y_t,
           dv_t = e^{k_t} A_t + c_t dy_t,   dk_t = e^{k_t} (A_t v_t + B_t) + c_t dy_t (v_t - y_t),
           du = sum_t c_t dy_t (v_t - y_t),   dw = sum_t dy_t e^{-d_t} (a'_{t-1} - y_t b'_{t-1}),
           where a' = da/dw, b' = db/dw go forward in time:  a'_t = e^w (a'_{t-1} + a_{t-1}),  b' likewise

Forward schedule: a program owns (batch, channel tile) and walks time with a, b held as mantissas over one
running exponent, as an online softmax does. It stores y and d, the logarithm of the mean's total weight.
Backward schedule: w is one number a channel for the whole sequence, so that its gradient can be taken in the
direction of time: a forward walk carries a' and b' beside a and b, needs no stored state, and sums dw and du.
The walk back carries A and B alone. They are mantissas over one exponent too: e^{k_t} and e^{-d_t} may each
be out of range, but e^{k_t} A_t holds weights of means, at most 1. The walks are independent, hence two
kernels, of which only the wanted ones run. dw and du are rows of partials, one a batch element, that a third
kernel adds.

op: rwkv4
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_row(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rwkv4_kernel(w_ptr, u_ptr, k_ptr, v_ptr, y_ptr, d_ptr, T, C, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    w, u = load_row(w_ptr, cols, mask), load_row(u_ptr, cols, mask)
    a = tl.zeros([BLOCK], dtype=tl.float32)
    b = tl.zeros([BLOCK], dtype=tl.float32)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # a and b are in units of e^m
    for t in range(T):
        offs = (batch * T + t) * C + cols
        k, v = load_row(k_ptr, offs, mask), load_row(v_ptr, offs, mask)
        top = tl.maximum(m, u + k)
        past, current = tl.exp(m - top), tl.exp(u + k - top)
        total = past * b + current
        y = (past * a + current * v) / total
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(d_ptr + offs, top + tl.log(total), mask=mask)
        top = tl.maximum(m + w, k)
        past, current = tl.exp(m + w - top), tl.exp(k - top)
        a, b, m = past * a + current * v, past * b + current, top


def rwkv4_forward(w, u, k, v):
    B, T, C = k.shape
    if k.shape != v.shape or not w.shape == u.shape == (C,):
        raise ValueError("k and v must have one shape, and w and u its channels")
    y, d = torch.empty_like(v), torch.empty(v.shape, device=v.device, dtype=torch.float32)
    rwkv4_kernel[(triton.cdiv(C, 64), B)](w, u, k, v, y, d, T, C, BLOCK=64)
    return y, d


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def rwkv4(w, u, k, v):
    """w, u: (C), w the logarithm of the decay; k, v: (B, T, C)."""
    return rwkv4_forward(*(tensor.contiguous() for tensor in (w, u, k, v)))[0]


def reference(w, u, k, v):
    a, b, steps = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        current, weight = torch.exp(u + k[:, t]), torch.exp(k[:, t])
        steps.append((a + current * v[:, t]) / (b + current))
        a, b = torch.exp(w) * a + weight * v[:, t], torch.exp(w) * b + weight
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 16, "T": 512, "C": 1024}, {"B": 3, "T": 301, "C": 250}]
SWEEP_CPU = [{"B": 2, "T": 26, "C": 35}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C = dims["B"], dims["T"], dims["C"]
    w, u = (
        -torch.exp(torch.randn(C, device=device, dtype=dtype) - 2),
        torch.randn(C, device=device, dtype=dtype),
    )
    return w, u, *(torch.randn(B, T, C, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def parameters_kernel(
    w_ptr, u_ptr, k_ptr, v_ptr, y_ptr, d_ptr, dy_ptr, dw_ptr, du_ptr, T, C, BLOCK: tl.constexpr
):
    """dw and du of a batch element, along time."""
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    w, u = load_row(w_ptr, cols, mask), load_row(u_ptr, cols, mask)
    a = tl.zeros([BLOCK], dtype=tl.float32)
    b = tl.zeros([BLOCK], dtype=tl.float32)
    slope_a = tl.zeros([BLOCK], dtype=tl.float32)
    slope_b = tl.zeros([BLOCK], dtype=tl.float32)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (batch * T + t) * C + cols
        k, v = load_row(k_ptr, offs, mask), load_row(v_ptr, offs, mask)
        y, d, dy = load_row(y_ptr, offs, mask), load_row(d_ptr, offs, mask), load_row(dy_ptr, offs, mask)
        dw += dy * tl.exp(m - d) * (slope_a - y * slope_b)
        du += dy * tl.exp(u + k - d) * (v - y)
        top = tl.maximum(m + w, k)
        past, current = tl.exp(m + w - top), tl.exp(k - top)
        slope_a, slope_b = past * (slope_a + a), past * (slope_b + b)
        a, b, m = past * a + current * v, past * b + current, top
    tl.store(dw_ptr + batch * C + cols, dw, mask=mask)
    tl.store(du_ptr + batch * C + cols, du, mask=mask)


@triton.jit
def rwkv4_backward_kernel(
    w_ptr, u_ptr, k_ptr, v_ptr, y_ptr, d_ptr, dy_ptr, dk_ptr, dv_ptr, T, C, BLOCK: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    w, u = load_row(w_ptr, cols, mask), load_row(u_ptr, cols, mask)
    A = tl.zeros([BLOCK], dtype=tl.float32)
    B = tl.zeros([BLOCK], dtype=tl.float32)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # A and B are in units of e^m
    for back in range(T):
        offs = (batch * T + T - 1 - back) * C + cols
        k, v = load_row(k_ptr, offs, mask), load_row(v_ptr, offs, mask)
        y, d, dy = load_row(y_ptr, offs, mask), load_row(d_ptr, offs, mask), load_row(dy_ptr, offs, mask)
        later, own = tl.exp(k + m), tl.exp(u + k - d) * dy
        dv = later * A + own
        dk = later * (A * v + B) + own * (v - y)
        tl.store(dk_ptr + offs, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=mask)
        top = tl.maximum(m + w, -d)
        past, current = tl.exp(m + w - top), tl.exp(-d - top) * dy
        A, B, m = past * A + current, past * B - current * y, top


@triton.jit
def batch_sum_kernel(part_ptr, out_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        total += tl.load(part_ptr + b * C + cols, mask=cols < C, other=0.0)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < C)


def batch_sum(part, like):
    (B, C), out = part.shape, torch.empty_like(like)
    batch_sum_kernel[(triton.cdiv(C, 64),)](part, out, B, C, BLOCK=64)
    return out


class Rwkv4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        y, d = rwkv4_forward(*inputs)
        ctx.save_for_backward(*inputs, y, d)
        return y

    @staticmethod
    def backward(ctx, dy):
        w, u, k, v, y, d = ctx.saved_tensors
        (B, T, C), needs = k.shape, ctx.needs_input_grad
        saved, grid = (w, u, k, v, y, d, dy.contiguous()), (triton.cdiv(C, 64), B)
        dw = du = dk = dv = None
        if needs[0] or needs[1]:
            dw, du = (torch.empty((B, C), device=k.device, dtype=torch.float32) for _ in range(2))
            parameters_kernel[grid](*saved, dw, du, T, C, BLOCK=64)
        if needs[2] or needs[3]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            rwkv4_backward_kernel[grid](*saved, dk, dv, T, C, BLOCK=64)
        return (
            batch_sum(dw, w) if needs[0] else None,
            batch_sum(du, u) if needs[1] else None,
            dk if needs[2] else None,
            dv if needs[3] else None,
        )


def rwkv4_autograd(w, u, k, v):
    return Rwkv4.apply(w, u, k, v)
