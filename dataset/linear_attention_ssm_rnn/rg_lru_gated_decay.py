"""The real-gated linear recurrent unit of Griffin: a gate moves the decay, and the input is scaled to fit it.

Forward    r_t = sigmoid(zr_t),  i_t = sigmoid(zi_t),  v_t = -c softplus(lam) r_t,  a_t = e^{v_t},
           m_t = (1 - a_t^2 + eps)^{1/2},   h_t = a_t h_{t-1} + m_t i_t x_t,  h_{-1} = 0
           (lam one a channel, c = 8; m keeps the variance of h where x has one)
Backward   with g_t = dh_t + a_{t+1} g_{t+1}:   dx_t = g_t m_t i_t,   di_t = g_t m_t x_t,
           dm_t = g_t i_t x_t, and m_t^2 = 1 + eps - a_t^2, so  dv_t = a_t (g_t h_{t-1} - dm_t a_t / m_t);
           dr_t = -c softplus(lam) dv_t,   dlam = -c sigmoid(lam) sum over batch and time of r_t dv_t;
           dzr_t = dr_t r_t (1 - r_t),   dzi_t = di_t i_t (1 - i_t)

Forward schedule: a program owns (batch, channel tile) and walks time; the gates never leave its registers.
For a decay near 1, 1 - a^2 is a difference of near-equal numbers: it is made from v by a short series there.
Without eps the slope of m would be infinite at a = 1.
Backward schedule: the same owner in reverse with a_{t+1} g_{t+1} in registers; h_{t-1} is the output, and the
gates are rebuilt from their pre-activations, two sigmoids a step being cheaper than three more tensors. lam
is one number a channel, read at every step: its sum over time stays in registers, one row a batch element is
stored, and a second kernel adds the rows and applies the slope of softplus, once.

op: rg_lru
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_C = 64
EPS = 1e-6


@triton.jit
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_step(ptr, value, offs, mask):
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def log_1p(e):
    """log(1 + e) for 0 <= e <= 1, by a series where 1 + e would lose e's digits."""
    series = e * (1 - e * (1.0 / 2 - e * (1.0 / 3 - e * (1.0 / 4 - e / 5))))
    return tl.where(e < 0.03, series, tl.log(1.0 + e))


@triton.jit
def softplus(x):
    return tl.where(x > 0, x, 0.0) + log_1p(tl.exp(tl.where(x > 0, -x, x)))


@triton.jit
def decay_and_scale(v, eps):
    """a = e^v and m = (1 - e^{2v} + eps)^{1/2} for v <= 0."""
    w = 2 * v
    series = -w * (1 + w / 2 * (1 + w / 3 * (1 + w / 4 * (1 + w / 5))))
    return tl.exp(v), tl.sqrt(tl.where(w > -0.05, series, 1 - tl.exp(w)) + eps)


@triton.jit
def rg_lru_kernel(x_ptr, zr_ptr, zi_ptr, lam_ptr, h_ptr, T, C, c, eps, BLOCK_C: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    first = tl.program_id(1).to(tl.int64) * T * C + cols
    rate = -c * softplus(load_step(lam_ptr, cols, mask))
    h = tl.zeros([BLOCK_C], dtype=tl.float32)
    for t in range(T):
        offs = first + t * C
        a, m = decay_and_scale(rate * tl.sigmoid(load_step(zr_ptr, offs, mask)), eps)
        i = tl.sigmoid(load_step(zi_ptr, offs, mask))
        h = a * h + m * i * load_step(x_ptr, offs, mask)
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def rg_lru(x, zr, zi, lam, c=8.0):
    """x, zr, zi: (B, T, C); lam: (C). Gives h, (B, T, C) in float32."""
    x, zr, zi, lam = x.contiguous(), zr.contiguous(), zi.contiguous(), lam.contiguous()
    B, T, C = x.shape
    if not x.shape == zr.shape == zi.shape or lam.shape != (C,):
        raise ValueError("x, zr and zi must have one shape, and lam one number a channel")
    h = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    rg_lru_kernel[(triton.cdiv(C, BLOCK_C), B)](x, zr, zi, lam, h, T, C, c, EPS, BLOCK_C=BLOCK_C)
    return h


def reference(x, zr, zi, lam, c=8.0):
    dtype = torch.promote_types(x.dtype, torch.float32)
    v = -c * torch.nn.functional.softplus(lam.to(dtype)) * torch.sigmoid(zr.to(dtype))
    u = torch.sqrt(-torch.expm1(2 * v) + EPS) * torch.sigmoid(zi.to(dtype)) * x.to(dtype)
    h, steps = torch.zeros_like(u[:, 0]), []
    for t in range(x.shape[1]):
        h = v[:, t].exp() * h + u[:, t]
        steps.append(h)
    return torch.stack(steps, dim=1)


SWEEP = [{"B": 8, "T": 2048, "C": 2560}, {"B": 2, "T": 4001, "C": 1000}]
SWEEP_CPU = [{"B": 2, "T": 23, "C": 70}, {"B": 3, "T": 16, "C": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    x, zr, zi = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return (
        x,
        zr,
        zi,
        torch.randn(dims["C"], device=device, dtype=dtype) - 4,
    )  # a near 1 where the gate is open


# ---- backward ----


@triton.jit
def rg_lru_backward_kernel(
    x_ptr, zr_ptr, zi_ptr, lam_ptr, h_ptr, dh_ptr, dx_ptr, dzr_ptr, dzi_ptr, part_ptr, T, C, c, eps,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    batch = tl.program_id(1).to(tl.int64)
    first = batch * T * C + cols
    rate = -c * softplus(load_step(lam_ptr, cols, mask))
    carry = tl.zeros([BLOCK_C], dtype=tl.float32)
    drate = tl.zeros([BLOCK_C], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = first + t * C
        r = tl.sigmoid(load_step(zr_ptr, offs, mask))
        i = tl.sigmoid(load_step(zi_ptr, offs, mask))
        x = load_step(x_ptr, offs, mask)
        before = load_step(h_ptr, offs - C, mask & (t > 0))
        a, m = decay_and_scale(rate * r, eps)
        g = load_step(dh_ptr, offs, mask) + carry
        store_step(dx_ptr, g * m * i, offs, mask)
        store_step(dzi_ptr, g * m * x * i * (1 - i), offs, mask)
        dv = a * (g * before - g * i * x * a / m)
        store_step(dzr_ptr, dv * rate * r * (1 - r), offs, mask)
        drate += dv * r
        carry = a * g
    tl.store(part_ptr + batch * C + cols, drate, mask=mask)


@triton.jit
def dlam_kernel(part_ptr, lam_ptr, dlam_ptr, B, C, c, BLOCK_C: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    drate = tl.zeros([BLOCK_C], dtype=tl.float32)
    for b in range(B):
        drate += tl.load(part_ptr + b * C + cols, mask=mask, other=0.0)
    store_step(dlam_ptr, -c * tl.sigmoid(load_step(lam_ptr, cols, mask)) * drate, cols, mask)


class RgLru(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, zr, zi, lam, c):
        x, zr, zi, lam = x.contiguous(), zr.contiguous(), zi.contiguous(), lam.contiguous()
        h = rg_lru(x, zr, zi, lam, c)
        ctx.save_for_backward(x, zr, zi, lam, h)
        ctx.c = c
        return h

    @staticmethod
    def backward(ctx, dh):
        x, zr, zi, lam, h = ctx.saved_tensors
        (B, T, C), c, tiles = x.shape, ctx.c, triton.cdiv(x.shape[2], BLOCK_C)
        dx, dzr, dzi, dlam = (torch.empty_like(tensor) for tensor in (x, zr, zi, lam))
        part = torch.empty((B, C), device=x.device, dtype=torch.float32)
        rg_lru_backward_kernel[(tiles, B)](
            x, zr, zi, lam, h, dh.contiguous(), dx, dzr, dzi, part, T, C, c, EPS, BLOCK_C=BLOCK_C
        )
        if ctx.needs_input_grad[3]:
            dlam_kernel[(tiles,)](part, lam, dlam, B, C, c, BLOCK_C=BLOCK_C)
        grads = zip((dx, dzr, dzi, dlam), ctx.needs_input_grad[:4], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def rg_lru_autograd(x, zr, zi, lam, c=8.0):
    return RgLru.apply(x, zr, zi, lam, c)
