"""Simple recurrent unit: gates that see the last state through a diagonal, and a highway around the cell.

Forward    f_t = sigmoid(zf_t + vf c_{t-1}),  r_t = sigmoid(zr_t + vr c_{t-1}),
           c_t = f_t c_{t-1} + (1 - f_t) x_t,  c_{-1} = 0,   h_t = r_t c_t + (1 - r_t) s_t
           (zf, zr, x, s from outside, per channel and step; vf, vr per channel)
Backward   with g_t the gradient of c_t along all paths:   g_t = dh_t r_t + (from t+1),
           dzf_t = g_t (c_{t-1} - x_t) f_t (1 - f_t),   dzr_t = dh_t (c_t - s_t) r_t (1 - r_t),
           dx_t = g_t (1 - f_t),   ds_t = dh_t (1 - r_t);   to t-1:  g_t f_t + dzf_t vf + dzr_t vr;
           dvf = sum over batch and time of dzf_t c_{t-1},   dvr likewise with dzr

Forward schedule: all products with matrices are outside, so that a channel is on its own: a program owns
(batch, channel tile) and walks time. It stores h and, in float32, c.
Backward schedule: the same owner in reverse. c is kept, since h mixes it with s and cannot give it back where
r is small; both gates are rebuilt, a sigmoid being cheaper than a load. The diagonals make the recurrence
nonlinear: three terms go back to c_{t-1}, and they are sums of numbers that the step has made for its own
gradients anyway. dvf and dvr add up in registers over time and go through a slot a batch element.

op: sru
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
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
def store_step(ptr, value, offs, mask):
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sru_kernel(zf_ptr, zr_ptr, x_ptr, s_ptr, vf_ptr, vr_ptr, h_ptr, c_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    vf, vr = load_step(vf_ptr, cols, mask), load_step(vr_ptr, cols, mask)
    c = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        f = tl.sigmoid(load_step(zf_ptr, offs, mask) + vf * c)
        r = tl.sigmoid(load_step(zr_ptr, offs, mask) + vr * c)
        c = f * c + (1 - f) * load_step(x_ptr, offs, mask)
        h = r * c + (1 - r) * load_step(s_ptr, offs, mask)
        tl.store(c_ptr + offs, c, mask=mask)
        store_step(h_ptr, h, offs, mask)


def sru_forward(zf, zr, x, s, vf, vr):
    B, T, C = x.shape
    if not zf.shape == zr.shape == x.shape == s.shape or not vf.shape == vr.shape == (C,):
        raise ValueError("zf, zr, x and s must have one shape, and vf and vr its channels")
    h, c = torch.empty_like(x), torch.empty(x.shape, device=x.device, dtype=torch.float32)
    sru_kernel[(triton.cdiv(C, 64), B)](zf, zr, x, s, vf, vr, h, c, T, C, BLOCK=64)
    return h, c


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def sru(zf, zr, x, s, vf, vr):
    """zf, zr, x, s: (B, T, C); vf, vr: (C)."""
    return sru_forward(*(tensor.contiguous() for tensor in (zf, zr, x, s, vf, vr)))[0]


def reference(zf, zr, x, s, vf, vr):
    c, steps = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        f, r = torch.sigmoid(zf[:, t] + vf * c), torch.sigmoid(zr[:, t] + vr * c)
        c = f * c + (1 - f) * x[:, t]
        steps.append(r * c + (1 - r) * s[:, t])
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 32, "T": 512, "C": 1024}, {"B": 3, "T": 1021, "C": 500}]
SWEEP_CPU = [{"B": 3, "T": 26, "C": 21}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C = dims["B"], dims["T"], dims["C"]
    zf, zr, x, s = (torch.randn(B, T, C, device=device, dtype=dtype) for _ in range(4))
    return zf, zr, x, s, *(torch.randn(C, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def sru_backward_kernel(
    zf_ptr, zr_ptr, x_ptr, s_ptr, vf_ptr, vr_ptr, c_ptr, dh_ptr,
    dzf_ptr, dzr_ptr, dx_ptr, ds_ptr, dvf_ptr, dvr_ptr, T, C, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    vf, vr = load_step(vf_ptr, cols, mask), load_step(vr_ptr, cols, mask)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    dvf = tl.zeros([BLOCK], dtype=tl.float32)
    dvr = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = (b * T + t) * C + cols
        c, before = load_step(c_ptr, offs, mask), load_step(c_ptr, offs - C, mask & (t > 0))
        f = tl.sigmoid(load_step(zf_ptr, offs, mask) + vf * before)
        r = tl.sigmoid(load_step(zr_ptr, offs, mask) + vr * before)
        dh = load_step(dh_ptr, offs, mask)
        g = carry + dh * r
        dzf = g * (before - load_step(x_ptr, offs, mask)) * f * (1 - f)
        dzr = dh * (c - load_step(s_ptr, offs, mask)) * r * (1 - r)
        store_step(dzf_ptr, dzf, offs, mask)
        store_step(dzr_ptr, dzr, offs, mask)
        store_step(dx_ptr, g * (1 - f), offs, mask)
        store_step(ds_ptr, dh * (1 - r), offs, mask)
        dvf += dzf * before
        dvr += dzr * before
        carry = g * f + dzf * vf + dzr * vr
    tl.store(dvf_ptr + b * C + cols, dvf, mask=mask)
    tl.store(dvr_ptr + b * C + cols, dvr, mask=mask)


@triton.jit
def batch_sum_kernel(part_ptr, out_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        total += tl.load(part_ptr + b * C + cols, mask=cols < C, other=0.0)
    store_step(out_ptr, total, cols, cols < C)


def batch_sum(part, like):
    (B, C), out = part.shape, torch.empty_like(like)
    batch_sum_kernel[(triton.cdiv(C, 64),)](part, out, B, C, BLOCK=64)
    return out


class Sru(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        h, c = sru_forward(*inputs)
        ctx.save_for_backward(*inputs, c)
        return h

    @staticmethod
    def backward(ctx, dh):
        *inputs, c = ctx.saved_tensors
        (B, T, C), needs = c.shape, ctx.needs_input_grad
        grads = [torch.empty_like(tensor) for tensor in inputs[:4]]
        parts = [torch.empty((B, C), device=c.device, dtype=torch.float32) for _ in range(2)]
        sru_backward_kernel[(triton.cdiv(C, 64), B)](
            *inputs, c, dh.contiguous(), *grads, *parts, T, C, BLOCK=64
        )
        return (
            *(grad if needed else None for grad, needed in zip(grads, needs[:4], strict=True)),
            batch_sum(parts[0], inputs[4]) if needs[4] else None,
            batch_sum(parts[1], inputs[5]) if needs[5] else None,
        )


def sru_autograd(zf, zr, x, s, vf, vr):
    return Sru.apply(zf, zr, x, s, vf, vr)
