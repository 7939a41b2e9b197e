"""minGRU in log space: a gated average of positive numbers that never leaves the logarithms.

Forward    z_t = sigmoid(k_t),  g(x) = x + 1/2 for x >= 0, sigmoid(x) below,
           h_t = (1 - z_t) h_{t-1} + z_t g(x_t),  h_{-1} = 1/2;   with l = log h, softplus(u) = log(1 + e^u):
           l_t = logaddexp(a_t, b_t),   a_t = l_{t-1} - softplus(k_t),   b_t = log g(x_t) - softplus(-k_t)
Backward   logaddexp hands its gradient on by shares, p_t = e^{a_t - l_t} for the past and 1 - p_t for the
           present. With G_t the gradient of l_t:   G_t = dh_t h_t + p_{t+1} G_{t+1},
           dk_t = G_t ((1 - p_t) (1 - z_t) - p_t z_t),
           dx_t = G_t (1 - p_t) (1 / (x_t + 1/2) for x_t >= 0, sigmoid(-x_t) below)

Forward schedule: a program owns (batch, channel tile) and walks time with l in registers, so that no product
of many gates underflows; it stores h and, in float32, l.
Backward schedule: the same owner walks back with p_{t+1} G_{t+1}. All exponents are differences of the saved
l, at most 0, and h_t is e^{l_t}. Both shares are exponentials, since 1 - p of a p near 1 would have no digits
left, and there is no division by z or 1 - z, which are 0 in float32 for strong gates.

op: mingru
schedule: reverse_scan, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softplus(u):
    return tl.where(u < 0, 0.0, u) + tl.log(1.0 + tl.exp(tl.where(u < 0, u, -u)))


@triton.jit
def mingru_kernel(k_ptr, x_ptr, h_ptr, l_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    log_h = tl.full([BLOCK], -0.6931471805599453, dtype=tl.float32)  # log 1/2
    for t in range(T):
        offs = (b * T + t) * C + cols
        k = tl.load(k_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        past = log_h - softplus(k)
        log_g = tl.where(x < 0, -softplus(-x), tl.log(tl.where(x < 0, 0.0, x) + 0.5))
        log_h = past + softplus(log_g - softplus(-k) - past)  # logaddexp
        tl.store(l_ptr + offs, log_h, mask=mask)
        tl.store(h_ptr + offs, tl.exp(log_h).to(h_ptr.dtype.element_ty), mask=mask)


def mingru_forward(k, x):
    if k.shape != x.shape:
        raise ValueError("k and x must have one shape")
    B, T, C = x.shape
    h, log_h = torch.empty_like(x), torch.empty(x.shape, device=x.device, dtype=torch.float32)
    mingru_kernel[(triton.cdiv(C, 64), B)](k, x, h, log_h, T, C, BLOCK=64)
    return h, log_h


@autodiff(inputs_require_grad=(0, 1))
def mingru(k, x):
    """k, x: (B, T, C), the gate and the candidate before their functions; gives h of the same shape."""
    return mingru_forward(k.contiguous(), x.contiguous())[0]


def reference(k, x):
    g = torch.where(x >= 0, x + 0.5, torch.sigmoid(x))
    h, steps = torch.full_like(x[:, 0], 0.5), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(k[:, t])
        h = (1 - z) * h + z * g[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 32, "T": 512, "C": 1024}, {"B": 3, "T": 1021, "C": 500}]
SWEEP_CPU = [{"B": 2, "T": 28, "C": 17}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def mingru_backward_kernel(k_ptr, x_ptr, l_ptr, dh_ptr, dk_ptr, dx_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # p_{t+1} G_{t+1}
    log_h = tl.load(l_ptr + (b * T + T - 1) * C + cols, mask=mask, other=0.0)
    for back in range(T):
        t = T - 1 - back
        offs = (b * T + t) * C + cols
        k = tl.load(k_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(l_ptr + offs - C, mask=mask & (t > 0), other=0.0)
        before = tl.where(t > 0, before, -0.6931471805599453)
        grad = carry + tl.load(dh_ptr + offs, mask=mask, other=0.0).to(tl.float32) * tl.exp(log_h)
        p = tl.exp(before - softplus(k) - log_h)
        log_g = tl.where(x < 0, -softplus(-x), tl.log(tl.where(x < 0, 0.0, x) + 0.5))
        present = tl.exp(log_g - softplus(-k) - log_h)  # 1 - p
        z = tl.sigmoid(k)
        slope = tl.where(x < 0, tl.sigmoid(-x), 1.0 / (tl.where(x < 0, 0.0, x) + 0.5))
        dk = grad * (present * (1 - z) - p * z)
        dx = grad * present * slope
        tl.store(dk_ptr + offs, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        carry = p * grad
        log_h = before


class MinGRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, x):
        k, x = k.contiguous(), x.contiguous()
        h, log_h = mingru_forward(k, x)
        ctx.save_for_backward(k, x, log_h)
        return h

    @staticmethod
    def backward(ctx, dh):
        k, x, log_h = ctx.saved_tensors
        B, T, C = x.shape
        dk, dx = torch.empty_like(k), torch.empty_like(x)
        mingru_backward_kernel[(triton.cdiv(C, 64), B)](k, x, log_h, dh.contiguous(), dk, dx, T, C, BLOCK=64)
        return dk if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None


def mingru_autograd(k, x):
    return MinGRU.apply(k, x)
