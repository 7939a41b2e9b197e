"""The core of a Mamba layer in one kernel: step size by softplus, selective scan, skip and gate.

Forward    r_t = raw_t + bias,  dt_t = softplus(r_t),  a_t = e^{dt_t A},  h_t = a_t * h_{t-1} + dt_t x_t B_t,
           y_t = <C_t, h_t> + D x_t,   out_t = y_t silu(z_t)
Backward   s = sigmoid(z):  dy_t = dout_t z s,   dz_t = dout_t y_t s (1 + z (1 - s));
           g_t = dy_t C_t + a_{t+1} * g_{t+1};   dC_t = sum_d dy_t h_t,  dB_t = sum_d g_t dt_t x_t,
           dx_t = dt_t <g_t, B_t> + D dy_t,   ddt_t = <g_t, A * a_t * h_{t-1}> + x_t <g_t, B_t>,
           draw_t = ddt_t sigmoid(r_t),  dbias = sum of draw over batch and time,
           dA = sum_t dt_t g_t * a_t * h_{t-1},   dD = sum_t dy_t x_t

Forward schedule: a program owns (batch, channel tile) with N states a channel in registers. dt and the
ungated y exist for one step only. The state before every SPAN-th step is stored.
Backward schedule: the same owner, a span at a time from the last: forward once more from the stored state,
with h_{t-1} of each step to a scratch that stays in cache, then back. The fused ends cost no traffic either:
dz needs the ungated y, which is one sum over the N states of an h_t that is at hand for dC anyway, so y is
neither saved nor made by a pass of its own, and the slope of softplus meets ddt before it is stored. x, raw
and z are a channel's own. B and C are all channels', so each tile stores its share of their gradients to a
slot, the parameters' sums over time go to a slot a batch element, and one kernel adds slots of either kind:
the result does not depend on the order of programs.

op: selective_scan_gated
schedule: reverse_scan, chunk_state_pass, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPAN = 16
BLOCK_D = 32


@triton.jit
def load_step(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def store_step(ptr, value, i, size):
    tl.store(ptr + i, value.to(ptr.dtype.element_ty), mask=i < size)


@triton.jit
def softplus(u):
    return tl.where(u < 0, 0.0, u) + tl.log(1.0 + tl.exp(tl.where(u < 0, u, -u)))


@triton.jit
def mamba_kernel(
    x_ptr, raw_ptr, bias_ptr, z_ptr, A_ptr, B_ptr, C_ptr, D_ptr, out_ptr, saved_ptr, T, D, N, spans,
    SPAN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mask = (d[:, None] < D) & (n[None, :] < N)
    place = d[:, None] * N + n[None, :]
    A = tl.load(A_ptr + place, mask=mask, other=0.0).to(tl.float32)
    skip, bias = load_step(D_ptr, d, D), load_step(bias_ptr, d, D)
    h = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            tl.store(saved_ptr + (batch * spans + t // SPAN) * D * N + place, h, mask=mask)
        step = batch * T + t
        x, z = load_step(x_ptr + step * D, d, D), load_step(z_ptr + step * D, d, D)
        B, C = load_step(B_ptr + step * N, n, N), load_step(C_ptr + step * N, n, N)
        dt = softplus(load_step(raw_ptr + step * D, d, D) + bias)
        h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
        y = tl.sum(h * C[None, :], axis=1) + skip * x
        store_step(out_ptr + step * D, y * z * tl.sigmoid(z), d, D)


def mamba_forward(x, raw, bias, z, A, B, C, D):
    (Bt, T, channels), N = x.shape, A.shape[1]
    if not x.shape == raw.shape == z.shape or not B.shape == C.shape == (Bt, T, N):
        raise ValueError("x, raw and z, and B and C, must have one shape and agree in batch and time")
    spans = triton.cdiv(T, SPAN)
    out = torch.empty_like(x)
    saved = torch.empty((Bt, spans, channels, N), device=x.device, dtype=torch.float32)
    mamba_kernel[(triton.cdiv(channels, BLOCK_D), Bt)](
        x, raw, bias, z, A, B, C, D, out, saved, T, channels, N, spans,
        SPAN=SPAN, BLOCK_D=BLOCK_D, BLOCK_N=triton.next_power_of_2(N),
    )  # fmt: skip
    return out, saved


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5, 6, 7))
def mamba_scan(x, raw, bias, z, A, B, C, D):
    """x, raw, z: (batch, T, d); bias, D: (d); A: (d, n), negative; B, C: (batch, T, n)."""
    return mamba_forward(*(tensor.contiguous() for tensor in (x, raw, bias, z, A, B, C, D)))[0]


def reference(x, raw, bias, z, A, B, C, D):
    dt = torch.nn.functional.softplus(raw + bias)
    h, steps = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None, :]
        steps.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(steps, dim=1) * torch.nn.functional.silu(z)


SWEEP = [{"Bt": 4, "T": 1024, "D": 2048, "N": 16}, {"Bt": 1, "T": 501, "D": 1530, "N": 12}]
SWEEP_CPU = [{"Bt": 1, "T": 19, "D": 35, "N": 4}, {"Bt": 2, "T": 5, "D": 10, "N": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    Bt, T, d, n = (dims[key] for key in ("Bt", "T", "D", "N"))
    x, raw, z = (torch.randn(Bt, T, d, device=device, dtype=dtype) for _ in range(3))
    bias, D = torch.randn(d, device=device, dtype=dtype) - 3, torch.randn(d, device=device, dtype=dtype)
    B, C = (torch.randn(Bt, T, n, device=device, dtype=dtype) for _ in range(2))
    return x, raw, bias, z, -0.5 - 3 * torch.rand(d, n, device=device, dtype=dtype), B, C, D


# ---- backward ----


@triton.jit
def mamba_backward_kernel(
    x_ptr, raw_ptr, bias_ptr, z_ptr, A_ptr, B_ptr, C_ptr, D_ptr, saved_ptr, dout_ptr, scratch_ptr,
    dx_ptr, draw_ptr, dz_ptr, dbias_ptr, dA_ptr, dB_ptr, dC_ptr, dD_ptr, T, D, N, spans,
    SPAN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mask = (d[:, None] < D) & (n[None, :] < N)
    place = d[:, None] * N + n[None, :]
    in_tile = tl.arange(0, BLOCK_D)[:, None] * BLOCK_N + n[None, :]
    scratch = scratch_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * SPAN * BLOCK_D * BLOCK_N
    A = tl.load(A_ptr + place, mask=mask, other=0.0).to(tl.float32)
    skip, bias = load_step(D_ptr, d, D), load_step(bias_ptr, d, D)
    carry = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)  # a_{t+1} g_{t+1}
    dA = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    dskip = tl.zeros([BLOCK_D], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_D], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        h = tl.load(saved_ptr + (batch * spans + start // SPAN) * D * N + place, mask=mask, other=0.0)
        for i in range(length):
            tl.store(scratch + i * BLOCK_D * BLOCK_N + in_tile, h)
            step = batch * T + start + i
            dt = softplus(load_step(raw_ptr + step * D, d, D) + bias)
            B = load_step(B_ptr + step * N, n, N)
            h = tl.exp(dt[:, None] * A) * h + (dt * load_step(x_ptr + step * D, d, D))[:, None] * B[None, :]
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            step = batch * T + start + i
            slot = tl.program_id(0) * tl.num_programs(1) * T + step
            x, z = load_step(x_ptr + step * D, d, D), load_step(z_ptr + step * D, d, D)
            B, C = load_step(B_ptr + step * N, n, N), load_step(C_ptr + step * N, n, N)
            dout, r = load_step(dout_ptr + step * D, d, D), load_step(raw_ptr + step * D, d, D) + bias
            dt, s = softplus(r), tl.sigmoid(z)
            a = tl.exp(dt[:, None] * A)
            decayed = a * tl.load(scratch + i * BLOCK_D * BLOCK_N + in_tile)  # a_t h_{t-1}
            h = decayed + (dt * x)[:, None] * B[None, :]
            y = tl.sum(h * C[None, :], axis=1) + skip * x
            store_step(dz_ptr + step * D, dout * y * s * (1 + z * (1 - s)), d, D)
            dy = dout * z * s
            g = carry + dy[:, None] * C[None, :]
            store_step(dC_ptr + slot * N, tl.sum(dy[:, None] * h, axis=0), n, N)
            store_step(dB_ptr + slot * N, tl.sum(g * (dt * x)[:, None], axis=0), n, N)
            drive = tl.sum(g * B[None, :], axis=1)
            store_step(dx_ptr + step * D, dt * drive + skip * dy, d, D)
            draw = (tl.sum(g * A * decayed, axis=1) + x * drive) * tl.sigmoid(r)
            store_step(draw_ptr + step * D, draw, d, D)
            dbias += draw
            dA += dt[:, None] * g * decayed
            dskip += dy * x
            carry = a * g
        tl.debug_barrier()  # and the next span overwrites it
    tl.store(dA_ptr + batch * D * N + place, dA, mask=mask)
    store_step(dD_ptr + batch * D, dskip, d, D)
    store_step(dbias_ptr + batch * D, dbias, d, D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    store_step(out_ptr, acc, i, size)


def sum_slots(slots, like):
    out, size = torch.empty_like(like), like.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.shape[0], size, BLOCK=256)
    return out


class MambaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        out, saved = mamba_forward(*inputs)
        ctx.save_for_backward(*inputs, saved)
        return out

    @staticmethod
    def backward(ctx, dout):
        *inputs, saved = ctx.saved_tensors
        x, raw, bias, z, A, B, C, D = inputs
        (Bt, T, channels), N = x.shape, A.shape[1]
        tiles, BLOCK_N = triton.cdiv(channels, BLOCK_D), triton.next_power_of_2(N)
        scratch = saved.new_empty((Bt, tiles, SPAN, BLOCK_D, BLOCK_N))
        dx, draw, dz = (torch.empty_like(tensor) for tensor in (x, raw, z))
        dbias, dA, dD = (saved.new_empty((Bt, *tensor.shape)) for tensor in (bias, A, D))
        dB, dC = (saved.new_empty((tiles, *tensor.shape)) for tensor in (B, C))
        mamba_backward_kernel[(tiles, Bt)](
            *inputs, saved, dout.contiguous(), scratch, dx, draw, dz, dbias, dA, dB, dC, dD,
            T, channels, N, saved.shape[1], SPAN=SPAN, BLOCK_D=BLOCK_D, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        needs = ctx.needs_input_grad
        return (
            dx if needs[0] else None,
            draw if needs[1] else None,
            sum_slots(dbias, bias) if needs[2] else None,
            dz if needs[3] else None,
            sum_slots(dA, A) if needs[4] else None,
            sum_slots(dB, B) if needs[5] else None,
            sum_slots(dC, C) if needs[6] else None,
            sum_slots(dD, D) if needs[7] else None,
        )


def mamba_scan_autograd(x, raw, bias, z, A, B, C, D):
    return MambaScan.apply(x, raw, bias, z, A, B, C, D)
