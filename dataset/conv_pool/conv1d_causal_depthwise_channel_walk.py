"""Causal depthwise convolution and SiLU for sequences that come in pieces: a state goes in and comes out.

Forward    with x_{-3}, x_{-2}, x_{-1} from the incoming state (K = 4 taps):
           z_t = b + w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t,  y_t = z_t sigmoid(z_t);
           the outgoing state is the last three x, taken from the incoming one where T < 3
Backward   u_t = dy_t silu'(z_t), and 0 from T on;  dx_t = w_3 u_t + w_2 u_{t+1} + w_1 u_{t+2} + w_0 u_{t+3} +
           e_t for t = -3 .. T - 1, the first three of which are the incoming state's; e_t is the outgoing
           state's gradient where x_t is in it;   dw_k = sum_t u_t x_{t-3+k},  db = sum_t u_t

Forward schedule: a program owns (sequence, tile of channels) and walks the time with the last three x in
registers: each x is read once, and the state leaves as it is held.
Backward schedule: the same owner walks the time from the end. Where the forward keeps the last three x, this
keeps the last three u, so dx_t is four products in registers; z_t is rebuilt from x_{t-3} .. x_t, of which
one is new at each step. After the first time it goes on for three steps, with u = 0, and those dx are the
incoming state's. dw and db are sums over time and stay in registers for the whole walk: there is one row of
parts a sequence, not one a tile of times, and a second kernel adds the sequences. Such a walk suits pieces of
a long sequence, or many channels; few channels and a long time want tiles of time.

op: causal_conv1d
schedule: reverse_scan, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 64


@triton.jit
def load_taps(w_ptr, b_ptr, c, C):
    w0 = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptr + C + c, mask=c < C, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + 2 * C + c, mask=c < C, other=0.0).to(tl.float32)
    w3 = tl.load(w_ptr + 3 * C + c, mask=c < C, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def load_x(x_ptr, s_ptr, n, t, c, T, C):
    """x_t of one sequence; before 0 it is in the state, whose rows are the times -3, -2, -1."""
    x = tl.load(x_ptr + (n * T + t) * C + c, mask=(c < C) & (t >= 0), other=0.0)
    s = tl.load(s_ptr + (n * 3 + t + 3) * C + c, mask=(c < C) & (t >= -3) & (t < 0), other=0.0)
    return x.to(tl.float32) + s.to(tl.float32)


@triton.jit
def walk_kernel(x_ptr, w_ptr, b_ptr, s_ptr, y_ptr, out_ptr, T, C, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3, b = load_taps(w_ptr, b_ptr, c, C)
    x3 = load_x(x_ptr, s_ptr, n, -3, c, T, C)
    x2 = load_x(x_ptr, s_ptr, n, -2, c, T, C)
    x1 = load_x(x_ptr, s_ptr, n, -1, c, T, C)
    for t in range(T):
        x = load_x(x_ptr, s_ptr, n, t, c, T, C)
        z = b + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x
        y = z * tl.sigmoid(z)
        tl.store(y_ptr + (n * T + t) * C + c, y.to(y_ptr.dtype.element_ty), mask=c < C)
        x3, x2, x1 = x2, x1, x
    out = out_ptr + n * 3 * C + c
    tl.store(out, x3.to(out_ptr.dtype.element_ty), mask=c < C)
    tl.store(out + C, x2.to(out_ptr.dtype.element_ty), mask=c < C)
    tl.store(out + 2 * C, x1.to(out_ptr.dtype.element_ty), mask=c < C)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def conv_walk(x, w, b, state):
    """x: (B, T, C); w: (4, C), the last tap is the present; b: (C); state: (B, 3, C), the last inputs of the
    piece before. Gives y: (B, T, C) and the state for the next piece."""
    (B, T, C), out = x.shape, torch.empty(state.shape, device=x.device, dtype=x.dtype)
    if w.shape != (4, C) or b.shape != (C,) or state.shape != (B, 3, C):
        raise ValueError(f"w {tuple(w.shape)} and state {tuple(state.shape)} are not for {tuple(x.shape)}")
    x, w, b, state = x.contiguous(), w.contiguous(), b.contiguous(), state.contiguous()
    y = torch.empty_like(x)
    walk_kernel[(B, triton.cdiv(C, BLOCK))](x, w, b, state, y, out, T, C, BLOCK=BLOCK)
    return y, out


def reference(x, w, b, state):
    T, whole = x.shape[1], torch.cat([state, x], dim=1)
    z = b + sum(w[k] * whole[:, k : k + T] for k in range(4))
    return torch.nn.functional.silu(z), whole[:, T:]


SWEEP = [{"B": 16, "T": 512, "C": 4096}, {"B": 7, "T": 301, "C": 2500}]
SWEEP_CPU = [{"B": 3, "T": 13, "C": 20}, {"B": 1, "T": 2, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C = dims["B"], dims["T"], dims["C"]
    x = torch.randn(B, T, C, device=device, dtype=dtype)
    w = torch.randn(4, C, device=device, dtype=dtype) / 2
    b = torch.randn(C, device=device, dtype=dtype)
    return x, w, b, torch.randn(B, 3, C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def walk_back_kernel(
    x_ptr, w_ptr, b_ptr, s_ptr, dy_ptr, dout_ptr, dx_ptr, ds_ptr, part_ptr, T, C, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3, b = load_taps(w_ptr, b_ptr, c, C)
    u1 = tl.zeros([BLOCK], dtype=tl.float32)  # u_{t+1}, and so on
    u2 = tl.zeros([BLOCK], dtype=tl.float32)
    u3 = tl.zeros([BLOCK], dtype=tl.float32)
    dw0 = tl.zeros([BLOCK], dtype=tl.float32)
    dw1 = tl.zeros([BLOCK], dtype=tl.float32)
    dw2 = tl.zeros([BLOCK], dtype=tl.float32)
    dw3 = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    x = load_x(x_ptr, s_ptr, n, T - 1, c, T, C)
    x1 = load_x(x_ptr, s_ptr, n, T - 2, c, T, C)
    x2 = load_x(x_ptr, s_ptr, n, T - 3, c, T, C)
    for step in range(T + 3):
        t = T - 1 - step
        x3 = load_x(x_ptr, s_ptr, n, t - 3, c, T, C)
        z = b + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x
        sig = tl.sigmoid(z)
        dy = tl.load(dy_ptr + (n * T + t) * C + c, mask=(c < C) & (t >= 0), other=0.0).to(tl.float32)
        u = dy * sig * (1 + z * (1 - sig))
        dw0 += u * x3
        dw1 += u * x2
        dw2 += u * x1
        dw3 += u * x
        db += u
        kept = tl.load(dout_ptr + (n * 3 + 2 - step) * C + c, mask=(c < C) & (step < 3), other=0.0)
        dx = w3 * u + w2 * u1 + w1 * u2 + w0 * u3 + kept.to(tl.float32)
        tl.store(dx_ptr + (n * T + t) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=(c < C) & (t >= 0))
        tl.store(ds_ptr + (n * 3 + t + 3) * C + c, dx.to(ds_ptr.dtype.element_ty), mask=(c < C) & (t < 0))
        u3, u2, u1 = u2, u1, u
        x, x1, x2 = x1, x2, x3
    part = part_ptr + n * 5 * C + c
    tl.store(part, dw0, mask=c < C)
    tl.store(part + C, dw1, mask=c < C)
    tl.store(part + 2 * C, dw2, mask=c < C)
    tl.store(part + 3 * C, dw3, mask=c < C)
    tl.store(part + 4 * C, db, mask=c < C)


@triton.jit
def add_sequences_kernel(part_ptr, dw_ptr, db_ptr, B, C, BLOCK: tl.constexpr):
    """Four rows of dw, and db as the fifth; at: a place in those five rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for n in range(B):
        acc += tl.load(part_ptr + n * 5 * C + at, mask=at < 5 * C, other=0.0)
    tl.store(dw_ptr + at, acc.to(dw_ptr.dtype.element_ty), mask=at < 4 * C)
    tl.store(db_ptr + at - 4 * C, acc.to(db_ptr.dtype.element_ty), mask=(at >= 4 * C) & (at < 5 * C))


class ConvWalk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, state):
        x, w, b, state = x.contiguous(), w.contiguous(), b.contiguous(), state.contiguous()
        ctx.save_for_backward(x, w, b, state)
        return conv_walk(x, w, b, state)

    @staticmethod
    def backward(ctx, dy, dout):
        x, w, b, state = ctx.saved_tensors
        (B, T, C), needs = x.shape, ctx.needs_input_grad
        dx, dw, db, dstate = (torch.empty_like(a) for a in (x, w, b, state))
        part = torch.empty((B, 5, C), device=x.device, dtype=torch.float32)
        walk_back_kernel[(B, triton.cdiv(C, BLOCK))](
            x, w, b, state, dy.contiguous(), dout.contiguous(), dx, dstate, part, T, C, BLOCK=BLOCK
        )
        if needs[1] or needs[2]:
            add_sequences_kernel[(triton.cdiv(5 * C, 128),)](part, dw, db, B, C, BLOCK=128)
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            db if needs[2] else None,
            dstate if needs[3] else None,
        )


def conv_walk_autograd(x, w, b, state):
    return ConvWalk.apply(x, w, b, state)
