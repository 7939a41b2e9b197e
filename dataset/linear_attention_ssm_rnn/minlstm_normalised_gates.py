"""minLSTM: two gates that see the input alone, normalised to sum to one.

Forward    f_t = sigmoid(zf_t),  i_t = sigmoid(zi_t),   a_t = f_t / (f_t + i_t),
           h_t = a_t h_{t-1} + (1 - a_t) x_t,   h_{-1} = h0      (i_t / (f_t + i_t) is 1 - a_t)
Backward   with g_t = dh_t + a_{t+1} g_{t+1}:   dx_t = (1 - a_t) g_t,   dh0 = a_0 g_0,
           da_t = g_t (h_{t-1} - x_t).  a is a sigmoid itself, a = sigmoid(log f - log i), so that no quotient
           rule is needed:  w_t = da_t a_t (1 - a_t),   dzf_t = w_t (1 - f_t),   dzi_t = -w_t (1 - i_t)

Forward schedule: a program owns (batch, channel tile) and walks time. log f - log i is made from softplus, so
that two shut gates, both near 0, still have a ratio.
Backward schedule: the same owner in reverse; h_{t-1} is an output and the gates are rebuilt, which leaves
nothing to save but the inputs. Seen through the logarithms, the normalised pair has one derivative, w, and
both gates share it: there are no terms to cancel, while the quotient rule divides by (f + i)^2.

op: minlstm
schedule: reverse_scan, recompute_from_stats
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
def log_sigmoid(z):
    """By selections, which unlike abs have the right slope at 0."""
    return tl.where(z > 0, 0.0, z) - tl.log(1.0 + tl.exp(tl.where(z > 0, -z, z)))


@triton.jit
def minlstm_kernel(x_ptr, zf_ptr, zi_ptr, h0_ptr, h_ptr, T, C, BLOCK_C: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    h = load_step(h0_ptr, batch * C + cols, mask)
    for t in range(T):
        offs = (batch * T + t) * C + cols
        zf, zi = load_step(zf_ptr, offs, mask), load_step(zi_ptr, offs, mask)
        a = tl.sigmoid(log_sigmoid(zf) - log_sigmoid(zi))
        h = a * h + (1 - a) * load_step(x_ptr, offs, mask)
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def minlstm(x, zf, zi, h0):
    """x, zf, zi: (B, T, C); h0: (B, C). Gives h, (B, T, C) in float32."""
    x, zf, zi, h0 = x.contiguous(), zf.contiguous(), zi.contiguous(), h0.contiguous()
    B, T, C = x.shape
    if not x.shape == zf.shape == zi.shape or h0.shape != (B, C):
        raise ValueError("x, zf and zi must have one shape, and h0 one row a sequence")
    h = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    minlstm_kernel[(triton.cdiv(C, BLOCK_C), B)](x, zf, zi, h0, h, T, C, BLOCK_C=BLOCK_C)
    return h


def reference(x, zf, zi, h0):
    dtype = torch.promote_types(x.dtype, torch.float32)
    f, i = torch.sigmoid(zf.to(dtype)), torch.sigmoid(zi.to(dtype))
    h, steps = h0.to(dtype), []
    for t in range(x.shape[1]):
        a = f[:, t] / (f[:, t] + i[:, t])
        h = a * h + (1 - a) * x[:, t].to(dtype)
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 16, "T": 2048, "C": 1024}, {"B": 4, "T": 4001, "C": 600}]
SWEEP_CPU = [{"B": 2, "T": 24, "C": 70}, {"B": 3, "T": 17, "C": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    x, zf, zi = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return x, zf + 1, zi, torch.randn(dims["B"], dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def minlstm_backward_kernel(
    x_ptr, zf_ptr, zi_ptr, h0_ptr, h_ptr, dh_ptr, dx_ptr, dzf_ptr, dzi_ptr, dh0_ptr, T, C,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    carry = tl.zeros([BLOCK_C], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = (batch * T + t) * C + cols
        zf, zi = load_step(zf_ptr, offs, mask), load_step(zi_ptr, offs, mask)
        a = tl.sigmoid(log_sigmoid(zf) - log_sigmoid(zi))
        before = load_step(h_ptr, offs - C, mask & (t > 0))
        before += load_step(h0_ptr, batch * C + cols, mask & (t == 0))
        g = load_step(dh_ptr, offs, mask) + carry
        store_step(dx_ptr, (1 - a) * g, offs, mask)
        w = g * (before - load_step(x_ptr, offs, mask)) * a * (1 - a)
        store_step(dzf_ptr, w * tl.sigmoid(-zf), offs, mask)
        store_step(dzi_ptr, -w * tl.sigmoid(-zi), offs, mask)
        carry = a * g
    store_step(dh0_ptr, carry, batch * C + cols, mask)


class MinLstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, zf, zi, h0):
        x, zf, zi, h0 = x.contiguous(), zf.contiguous(), zi.contiguous(), h0.contiguous()
        h = minlstm(x, zf, zi, h0)
        ctx.save_for_backward(x, zf, zi, h0, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        x, zf, zi, h0, h = ctx.saved_tensors
        B, T, C = x.shape
        grads = tuple(torch.empty_like(tensor) for tensor in (x, zf, zi, h0))
        minlstm_backward_kernel[(triton.cdiv(C, BLOCK_C), B)](
            x, zf, zi, h0, h, dh.contiguous(), *grads, T, C, BLOCK_C=BLOCK_C
        )
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def minlstm_autograd(x, zf, zi, h0):
    return MinLstm.apply(x, zf, zi, h0)
