"""Selective scan, a state-space model whose input, output and step size depend on time.

Forward    a_t = exp(dt_t A),  h_t = a_t * h_{t-1} + dt_t x_t B_t,  y_t = <C_t, h_t> + D x_t
           (per channel d a state of n numbers; A (d, n), D (d) fixed, dt, x (d) and B, C (n) per time step)
Backward   g_t = dy_t C_t + a_{t+1} * g_{t+1};   dC_t = sum_d dy_t h_t,  dB_t = sum_d g_t dt_t x_t,
           dx_t = dt_t <g_t, B_t> + D dy_t,   ddt_t = <g_t, A * a_t * h_{t-1} + x_t B_t>,
           dA = sum_t dt_t g_t * a_t * h_{t-1},  dD = sum_t dy_t x_t

Forward schedule: a program owns (batch, channel tile) with its states in registers, walks time and stores
every state.
Backward schedule: the same owner walks time in reverse with g in registers. x, dt, A and D belong to its
channels, so their gradients stay local: dx and ddt are stored per step, dA and dD after the walk, one slot
a batch element. B and C are shared by all channels: each channel tile stores its share in a slot of its
own, and a second kernel adds the slots: no atomics on T n addresses that every tile would hit in the same
order.

op: selective_scan
schedule: reverse_scan, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def selective_scan_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    y_ptr,
    h_ptr,
    T,
    D,
    N,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mask = (d[:, None] < D) & (n[None, :] < N)
    A = tl.load(a_ptr + d[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    skip = tl.load(d_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    h = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    for t in range(T):
        step = batch * T + t
        x = tl.load(x_ptr + step * D + d, mask=d < D, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + step * D + d, mask=d < D, other=0.0).to(tl.float32)
        B = tl.load(b_ptr + step * N + n, mask=n < N, other=0.0).to(tl.float32)
        C = tl.load(c_ptr + step * N + n, mask=n < N, other=0.0).to(tl.float32)
        h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
        tl.store(h_ptr + (step * D + d[:, None]) * N + n[None, :], h, mask=mask)
        tl.store(y_ptr + step * D + d, tl.sum(h * C[None, :], axis=1) + skip * x, mask=d < D)


def selective_scan_forward(x, dt, A, B, C, D):
    (batch, T, channels), N = x.shape, A.shape[1]
    y = torch.empty_like(x)
    h = torch.empty((batch, T, channels, N), device=x.device, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    selective_scan_kernel[(triton.cdiv(channels, 16), batch)](
        x, dt, A, B, C, D, y, h, T, channels, N, BLOCK_D=16, BLOCK_N=BLOCK_N
    )
    return y, h


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def selective_scan(x, dt, A, B, C, D):
    """x, dt: (batch, T, d); A: (d, n); B, C: (batch, T, n); D: (d)."""
    return selective_scan_forward(*(tensor.contiguous() for tensor in (x, dt, A, B, C, D)))[0]


def reference(x, dt, A, B, C, D):
    h, steps = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None, :]
        steps.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(steps, dim=1)


SWEEP = [
    {"B": 2, "T": 1024, "D": 2048, "N": 16},
    {"B": 4, "T": 512, "D": 3072, "N": 8},
    {"B": 5, "T": 1001, "D": 1001, "N": 5},
]
SWEEP_CPU = [{"B": 2, "T": 19, "D": 21, "N": 8}, {"B": 1, "T": 5, "D": 40, "N": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    batch, T, d, n = dims["B"], dims["T"], dims["D"], dims["N"]
    x = torch.randn(batch, T, d, device=device, dtype=dtype)
    dt = 0.1 + 0.5 * torch.rand(batch, T, d, device=device, dtype=dtype)
    A = -0.2 - torch.rand(d, n, device=device, dtype=dtype)
    B, C = (torch.randn(batch, T, n, device=device, dtype=dtype) for _ in range(2))
    return x, dt, A, B, C, torch.randn(d, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def selective_scan_backward_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, h_ptr, dy_ptr,
    dx_ptr, ddt_ptr, da_slots_ptr, db_slots_ptr, dc_slots_ptr, dd_slots_ptr,
    T, D, N, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mask = (d[:, None] < D) & (n[None, :] < N)
    A = tl.load(a_ptr + d[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    skip = tl.load(d_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    carry = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)  # a_{t+1} g_{t+1}
    dA = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    dskip = tl.zeros([BLOCK_D], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        step = batch * T + t
        slot = tl.program_id(0) * tl.num_programs(1) * T + step
        x = tl.load(x_ptr + step * D + d, mask=d < D, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + step * D + d, mask=d < D, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + step * D + d, mask=d < D, other=0.0).to(tl.float32)
        B = tl.load(b_ptr + step * N + n, mask=n < N, other=0.0).to(tl.float32)
        C = tl.load(c_ptr + step * N + n, mask=n < N, other=0.0).to(tl.float32)
        h_offs = (step * D + d[:, None]) * N + n[None, :]
        h = tl.load(h_ptr + h_offs, mask=mask, other=0.0)
        before = tl.load(h_ptr + h_offs - D * N, mask=mask & (t > 0), other=0.0)
        a = tl.exp(dt[:, None] * A)

        g = carry + dy[:, None] * C[None, :]
        tl.store(dc_slots_ptr + slot * N + n, tl.sum(dy[:, None] * h, axis=0), mask=n < N)
        tl.store(db_slots_ptr + slot * N + n, tl.sum(g * (dt * x)[:, None], axis=0), mask=n < N)
        tl.store(dx_ptr + step * D + d, dt * tl.sum(g * B[None, :], axis=1) + skip * dy, mask=d < D)
        ddt = tl.sum(g * (A * a * before + x[:, None] * B[None, :]), axis=1)
        tl.store(ddt_ptr + step * D + d, ddt, mask=d < D)
        dA += dt[:, None] * g * a * before
        dskip += dy * x
        carry = a * g
    tl.store(da_slots_ptr + (batch * D + d[:, None]) * N + n[None, :], dA, mask=mask)
    tl.store(dd_slots_ptr + batch * D + d, dskip, mask=d < D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc, mask=i < size)


def sum_slots(slots, like):
    out = torch.empty_like(like)
    size = out.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.shape[0], size, BLOCK=256)
    return out


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        y, h = selective_scan_forward(*inputs)
        ctx.save_for_backward(*inputs, h)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, dt, A, B, C, D, h = ctx.saved_tensors
        dy = dy.contiguous()
        (batch, T, channels), N = x.shape, A.shape[1]
        tiles = triton.cdiv(channels, 16)
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        options = {"device": x.device, "dtype": torch.float32}
        dA, dD = torch.empty((batch, channels, N), **options), torch.empty((batch, channels), **options)
        dB, dC = (torch.empty((tiles, batch, T, N), **options) for _ in range(2))
        BLOCK_N = triton.next_power_of_2(N)
        selective_scan_backward_kernel[(tiles, batch)](
            x, dt, A, B, C, D, h, dy, dx, ddt, dA, dB, dC, dD, T, channels, N, BLOCK_D=16, BLOCK_N=BLOCK_N
        )
        needs = ctx.needs_input_grad
        sums = (
            sum_slots(s, p) if n else None
            for s, p, n in zip((dA, dB, dC, dD), (A, B, C, D), needs[2:], strict=True)
        )
        return dx if needs[0] else None, ddt if needs[1] else None, *sums


def selective_scan_autograd(x, dt, A, B, C, D):
    return SelectiveScan.apply(x, dt, A, B, C, D)
