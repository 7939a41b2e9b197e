"""Linear recurrent unit: a complex decay per channel, stable by its parametrisation.

Forward    lam = e^{-e^nu + i e^theta},   h_t = lam h_{t-1} + u_t,  h_{-1} = 0
           (h and u complex; nu and theta real, one each a channel)
Backward   a real loss of complex numbers: gradients are taken with respect to real and imaginary parts, and
           written as complex numbers they obey  dp = conj(q) dy  for y = q p.  So
           G_t = dh_t + conj(lam) G_{t+1},   du_t = G_t,
           dlam = sum over batch and time of G_t conj(h_{t-1});
           d lam / d nu = -e^nu lam,  d lam / d theta = i e^theta lam:
           dnu = -e^nu Re(dlam conj(lam)),   dtheta = e^theta Im(dlam conj(lam))

Forward schedule: real and imaginary parts are planes of their own, (B, T, C) each, so that loads coalesce. A
program owns (batch, channel tile), makes lam once, and walks time with two registers a channel.
Backward schedule: the same owner walks back with G; h_{t-1} is read from the outputs. dlam is summed over
time in registers and stored as one row a batch element; a second kernel adds the rows and only then applies
the chain to nu and theta, once a channel: the chain is linear in dlam, so it commutes with the sum.

op: complex_recurrence
schedule: reverse_scan, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_decay(nu_ptr, theta_ptr, cols, C):
    nu = tl.load(nu_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    theta = tl.load(theta_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    size, angle = tl.exp(-tl.exp(nu)), tl.exp(theta)
    return size * tl.cos(angle), size * tl.sin(angle)


@triton.jit
def load_pair(re_ptr, im_ptr, offs, mask):
    re = tl.load(re_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return re, tl.load(im_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def lru_kernel(ur_ptr, ui_ptr, nu_ptr, theta_ptr, hr_ptr, hi_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    lr, li = load_decay(nu_ptr, theta_ptr, cols, C)
    hr = tl.zeros([BLOCK], dtype=tl.float32)
    hi = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * C + cols
        ur, ui = load_pair(ur_ptr, ui_ptr, offs, mask)
        hr, hi = lr * hr - li * hi + ur, lr * hi + li * hr + ui
        tl.store(hr_ptr + offs, hr, mask=mask)
        tl.store(hi_ptr + offs, hi, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def lru(ur, ui, nu, theta):
    """ur, ui: (B, T, C), real and imaginary parts; nu, theta: (C). Gives the parts of h."""
    ur, ui, nu, theta = ur.contiguous(), ui.contiguous(), nu.contiguous(), theta.contiguous()
    if ur.shape != ui.shape:
        raise ValueError("ur and ui must have one shape")
    B, T, C = ur.shape
    hr, hi = torch.empty_like(ur), torch.empty_like(ui)
    lru_kernel[(triton.cdiv(C, 64), B)](ur, ui, nu, theta, hr, hi, T, C, BLOCK=64)
    return hr, hi


def reference(ur, ui, nu, theta):
    size, angle = torch.exp(-torch.exp(nu)), torch.exp(theta)
    lr, li = size * torch.cos(angle), size * torch.sin(angle)
    hr, hi, steps = torch.zeros_like(ur[:, 0]), torch.zeros_like(ui[:, 0]), []
    for t in range(ur.shape[1]):
        hr, hi = lr * hr - li * hi + ur[:, t], lr * hi + li * hr + ui[:, t]
        steps.append((hr, hi))
    return tuple(torch.stack(part, dim=1) for part in zip(*steps, strict=True))


SWEEP = [{"B": 16, "T": 1024, "C": 512}, {"B": 3, "T": 2039, "C": 250}]
SWEEP_CPU = [{"B": 3, "T": 29, "C": 18}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C = dims["B"], dims["T"], dims["C"]
    ur, ui = (torch.randn(B, T, C, device=device, dtype=dtype) for _ in range(2))
    nu = -3 + 2 * torch.rand(C, device=device, dtype=dtype)
    return ur, ui, nu, torch.randn(C, device=device, dtype=dtype) - 1


# ---- backward ----


@triton.jit
def lru_backward_kernel(
    nu_ptr, theta_ptr, hr_ptr, hi_ptr, dhr_ptr, dhi_ptr, dur_ptr, dui_ptr, part_ptr, T, C, BLOCK: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    lr, li = load_decay(nu_ptr, theta_ptr, cols, C)
    gr = tl.zeros([BLOCK], dtype=tl.float32)
    gi = tl.zeros([BLOCK], dtype=tl.float32)
    dlr = tl.zeros([BLOCK], dtype=tl.float32)
    dli = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = (b * T + t) * C + cols
        dhr, dhi = load_pair(dhr_ptr, dhi_ptr, offs, mask)
        gr, gi = lr * gr + li * gi + dhr, lr * gi - li * gr + dhi
        tl.store(dur_ptr + offs, gr, mask=mask)
        tl.store(dui_ptr + offs, gi, mask=mask)
        hr, hi = load_pair(hr_ptr, hi_ptr, offs - C, mask & (t > 0))
        dlr += gr * hr + gi * hi
        dli += gi * hr - gr * hi
    tl.store(part_ptr + 2 * b * C + cols, dlr, mask=mask)
    tl.store(part_ptr + (2 * b + 1) * C + cols, dli, mask=mask)


@triton.jit
def decay_kernel(nu_ptr, theta_ptr, part_ptr, dnu_ptr, dtheta_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    dlr = tl.zeros([BLOCK], dtype=tl.float32)
    dli = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        dlr += tl.load(part_ptr + 2 * b * C + cols, mask=mask, other=0.0)
        dli += tl.load(part_ptr + (2 * b + 1) * C + cols, mask=mask, other=0.0)
    lr, li = load_decay(nu_ptr, theta_ptr, cols, C)
    nu = tl.load(nu_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    theta = tl.load(theta_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dnu_ptr + cols, -tl.exp(nu) * (dlr * lr + dli * li), mask=mask)
    tl.store(dtheta_ptr + cols, tl.exp(theta) * (dli * lr - dlr * li), mask=mask)


class LRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ur, ui, nu, theta):
        nu, theta = nu.contiguous(), theta.contiguous()
        hr, hi = lru(ur, ui, nu, theta)
        ctx.save_for_backward(nu, theta, hr, hi)
        return hr, hi

    @staticmethod
    def backward(ctx, dhr, dhi):
        nu, theta, hr, hi = ctx.saved_tensors
        (B, T, C), needs = hr.shape, ctx.needs_input_grad
        dur, dui, dnu, dtheta = (torch.empty_like(tensor) for tensor in (hr, hi, nu, theta))
        part = torch.empty((B, 2, C), device=hr.device, dtype=torch.float32)
        lru_backward_kernel[(triton.cdiv(C, 64), B)](
            nu, theta, hr, hi, dhr.contiguous(), dhi.contiguous(), dur, dui, part, T, C, BLOCK=64
        )
        if needs[2] or needs[3]:
            decay_kernel[(triton.cdiv(C, 64),)](nu, theta, part, dnu, dtheta, B, C, BLOCK=64)
        grads = zip((dur, dui, dnu, dtheta), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def lru_autograd(ur, ui, nu, theta):
    return LRU.apply(ur, ui, nu, theta)
