"""Selective scan with few states kept, the gradients of the shared B and C by atomic adds.

Forward    a_t = exp(dt_t A),  h_t = a_t * h_{t-1} + dt_t x_t B_t,  y_t = <C_t, h_t> + D x_t
           (per channel d a state of n numbers; A (d, n), D (d) fixed, dt, x (d) and B, C (n) per time step)
Backward   g_t = dy_t C_t + a_{t+1} * g_{t+1};   dC_t = sum_d dy_t h_t,  dB_t = sum_d g_t dt_t x_t,
           dx_t = dt_t <g_t, B_t> + D dy_t,   ddt_t = <g_t, A * a_t * h_{t-1} + x_t B_t>,
           dA = sum_t dt_t g_t * a_t * h_{t-1},  dD = sum_t dy_t x_t

Forward schedule: a program owns (batch, channel tile) with its states in registers and walks time. It stores
the state before every SPAN-th step, 1 / SPAN of what all states would take: d n numbers a step, n times x.
Backward schedule: the same owner walks the spans from last to first. A span is walked forward once more from
its stored state, h_{t-1} of each step going to a scratch of the program that stays in cache, and then back
with g in registers; barriers stand between, as a lane may read what another wrote. That is one more exp a
state and step, in place of memory for T states. x and dt belong to the tile. B and C are read by every
channel tile: each adds its share of n numbers a step to float32 buffers. The tiles run through time at their
own pace, so that they seldom meet on an address, and there are no slots to hold, of which wide models need
hundreds, and no second kernel; the price is an order of sums that varies. dA and dD are summed over time in
registers and added once.

op: selective_scan
schedule: reverse_scan, chunk_state_pass, atomic_accumulate, recompute_from_stats
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
def selective_scan_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, y_ptr, saved_ptr, T, D, N, spans,
    SPAN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mask = (d[:, None] < D) & (n[None, :] < N)
    place = d[:, None] * N + n[None, :]
    A = tl.load(A_ptr + place, mask=mask, other=0.0).to(tl.float32)
    skip = load_step(D_ptr, d, D)
    h = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            tl.store(saved_ptr + (batch * spans + t // SPAN) * D * N + place, h, mask=mask)
        step = batch * T + t
        x, dt = load_step(x_ptr + step * D, d, D), load_step(dt_ptr + step * D, d, D)
        B, C = load_step(B_ptr + step * N, n, N), load_step(C_ptr + step * N, n, N)
        h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
        y = tl.sum(h * C[None, :], axis=1) + skip * x
        tl.store(y_ptr + step * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def selective_scan_forward(x, dt, A, B, C, D):
    (Bt, T, channels), N = x.shape, A.shape[1]
    if dt.shape != x.shape or not B.shape == C.shape == (Bt, T, N):
        raise ValueError("x and dt, and B and C, must have one shape and agree in batch and time")
    spans = triton.cdiv(T, SPAN)
    y = torch.empty_like(x)
    saved = torch.empty((Bt, spans, channels, N), device=x.device, dtype=torch.float32)
    selective_scan_kernel[(triton.cdiv(channels, BLOCK_D), Bt)](
        x, dt, A, B, C, D, y, saved, T, channels, N, spans,
        SPAN=SPAN, BLOCK_D=BLOCK_D, BLOCK_N=triton.next_power_of_2(N),
    )  # fmt: skip
    return y, saved


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def selective_scan(x, dt, A, B, C, D):
    """x, dt: (batch, T, d); A: (d, n), negative; B, C: (batch, T, n); D: (d)."""
    return selective_scan_forward(*(tensor.contiguous() for tensor in (x, dt, A, B, C, D)))[0]


def reference(x, dt, A, B, C, D):
    h, steps = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None, :]
        steps.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(steps, dim=1)


SWEEP = [{"Bt": 4, "T": 1024, "D": 2048, "N": 16}, {"Bt": 1, "T": 501, "D": 1530, "N": 12}]
SWEEP_CPU = [{"Bt": 1, "T": 21, "D": 35, "N": 4}, {"Bt": 2, "T": 16, "D": 10, "N": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    Bt, T, d, n = (dims[key] for key in ("Bt", "T", "D", "N"))
    x = torch.randn(Bt, T, d, device=device, dtype=dtype)
    dt = torch.nn.functional.softplus(torch.randn(Bt, T, d, device=device, dtype=dtype) - 2)
    A = -0.5 - 3 * torch.rand(d, n, device=device, dtype=dtype)
    B, C = (torch.randn(Bt, T, n, device=device, dtype=dtype) for _ in range(2))
    return x, dt, A, B, C, torch.randn(d, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def selective_scan_backward_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, saved_ptr, dy_ptr, scratch_ptr,
    dx_ptr, ddt_ptr, dA_ptr, dB_ptr, dC_ptr, dD_ptr, T, D, N, spans,
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
    skip = load_step(D_ptr, d, D)
    carry = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)  # a_{t+1} g_{t+1}
    dA = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    dskip = tl.zeros([BLOCK_D], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        h = tl.load(saved_ptr + (batch * spans + start // SPAN) * D * N + place, mask=mask, other=0.0)
        for i in range(length):
            tl.store(scratch + i * BLOCK_D * BLOCK_N + in_tile, h)
            step = batch * T + start + i
            x, dt = load_step(x_ptr + step * D, d, D), load_step(dt_ptr + step * D, d, D)
            B = load_step(B_ptr + step * N, n, N)
            h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            step = batch * T + start + i
            x, dt = load_step(x_ptr + step * D, d, D), load_step(dt_ptr + step * D, d, D)
            B, C = load_step(B_ptr + step * N, n, N), load_step(C_ptr + step * N, n, N)
            dy = load_step(dy_ptr + step * D, d, D)
            a = tl.exp(dt[:, None] * A)
            decayed = a * tl.load(scratch + i * BLOCK_D * BLOCK_N + in_tile)  # a_t h_{t-1}
            h = decayed + (dt * x)[:, None] * B[None, :]
            g = carry + dy[:, None] * C[None, :]
            tl.atomic_add(dC_ptr + step * N + n, tl.sum(dy[:, None] * h, axis=0), mask=n < N)
            tl.atomic_add(dB_ptr + step * N + n, tl.sum(g * (dt * x)[:, None], axis=0), mask=n < N)
            drive = tl.sum(g * B[None, :], axis=1)
            dx = dt * drive + skip * dy
            ddt = tl.sum(g * A * decayed, axis=1) + x * drive
            tl.store(dx_ptr + step * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d < D)
            tl.store(ddt_ptr + step * D + d, ddt.to(ddt_ptr.dtype.element_ty), mask=d < D)
            dA += dt[:, None] * g * decayed
            dskip += dy * x
            carry = a * g
        tl.debug_barrier()  # and the next span overwrites it
    tl.atomic_add(dA_ptr + place, dA, mask=mask)
    tl.atomic_add(dD_ptr + d, dskip, mask=d < D)


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        y, saved = selective_scan_forward(*inputs)
        ctx.save_for_backward(*inputs, saved)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, dt, A, B, C, D, saved = ctx.saved_tensors
        (Bt, T, channels), N = x.shape, A.shape[1]
        tiles, BLOCK_N = triton.cdiv(channels, BLOCK_D), triton.next_power_of_2(N)
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        sums = [torch.zeros(p.shape, device=p.device, dtype=torch.float32) for p in (A, B, C, D)]
        scratch = saved.new_empty((Bt, tiles, SPAN, BLOCK_D, BLOCK_N))
        selective_scan_backward_kernel[(tiles, Bt)](
            x, dt, A, B, C, D, saved, dy.contiguous(), scratch, dx, ddt, *sums,
            T, channels, N, saved.shape[1], SPAN=SPAN, BLOCK_D=BLOCK_D, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        grads = (dx, ddt, *(total.to(p.dtype) for total, p in zip(sums, (A, B, C, D), strict=True)))
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def selective_scan_autograd(x, dt, A, B, C, D):
    return SelectiveScan.apply(x, dt, A, B, C, D)
