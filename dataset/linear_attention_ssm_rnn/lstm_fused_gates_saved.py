"""LSTM over time with the input projections made outside, the four gates saved.

Forward    a_t = x_t + h_{t-1} W   (x_t, a_t: (B, 4 D), the gates i, f, g, o side by side; W: (D, 4 D))
           i, f, o = sigmoid, g = tanh of their quarters;  c_t = f c_{t-1} + i g,  h_t = o tanh(c_t)
Backward   with dh = dy_t + (from t+1),  u = tanh(c_t),  dc = dh o (1 - u^2) + (from t+1):
           da_i = dc g i (1 - i),  da_f = dc c_{t-1} f (1 - f),  da_g = dc i (1 - g^2),
           da_o = dh u o (1 - o);   to t-1:  dc f  and  da W^T;   dx_t = da_t,   dW = sum_t h_{t-1}^T da_t

Forward schedule: the batch rows are independent, so a program owns a tile of them and walks time, all of h
and c in registers and four D x D dots a step, with W from cache. It stores h, c and the four gates.
Backward schedule: the same owners walk time in reverse with dh and dc in registers. The gates are read, not
rebuilt: rebuilding needs the four dots once more, inside the serial part, and their storage is as big as dx,
which has to be written anyway. The walk does only what is serial: da and its product with W^T. dW is not
in it. It is one product with the long axis (T B), made from stored h and da after the walk, tile by tile of
W by owners that loop over that axis: a full grid in place of the few programs of the walk, and no D x 4 D
accumulator beside the state. dh and dc that are left at the start are the gradients of h0 and c0.

op: lstm
schedule: reverse_scan, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def precision():
    """Of dots."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def tiling(D):
    """Tiles of the walks, and the precision of dots. A stage: no step can begin before the one before it has
    ended, and copies of W for several would not fit a multiprocessor."""
    blocks = {"BLOCK_B": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    return {"PRECISION": precision(), **blocks, "num_stages": 1}


@triton.jit
def load_tile(ptr, rows, cols, R, C, width):
    """Tile of an R x C matrix whose rows lie `width` apart."""
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * width + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C, width):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * width + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def preactivation(x_ptr, w_ptr, h, rows, d, B, D, gate, PRECISION: tl.constexpr):
    x = load_tile(x_ptr + gate * D, rows, d, B, D, 4 * D).to(tl.float32)
    w = load_tile(w_ptr + gate * D, d, d, D, D, 4 * D)
    return tl.dot(h.to(w.dtype), w, x, input_precision=PRECISION)


@triton.jit
def sigmoid(a):
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def tanh(a):
    return 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)


@triton.jit
def lstm_kernel(
    x_ptr, w_ptr, h0_ptr, c0_ptr, h_ptr, c_ptr, gates_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    h = load_tile(h0_ptr, rows, d, B, D, D).to(tl.float32)
    c = load_tile(c0_ptr, rows, d, B, D, D).to(tl.float32)
    for t in range(T):
        step = tl.cast(t, tl.int64) * B * D
        i = sigmoid(preactivation(x_ptr + 4 * step, w_ptr, h, rows, d, B, D, 0, PRECISION))
        f = sigmoid(preactivation(x_ptr + 4 * step, w_ptr, h, rows, d, B, D, 1, PRECISION))
        g = tanh(preactivation(x_ptr + 4 * step, w_ptr, h, rows, d, B, D, 2, PRECISION))
        o = sigmoid(preactivation(x_ptr + 4 * step, w_ptr, h, rows, d, B, D, 3, PRECISION))
        c = f * c + i * g
        h = o * tanh(c)
        store_tile(h_ptr + step, h, rows, d, B, D, D)
        store_tile(c_ptr + step, c, rows, d, B, D, D)
        store_tile(gates_ptr + 4 * step, i, rows, d, B, D, 4 * D)
        store_tile(gates_ptr + 4 * step + D, f, rows, d, B, D, 4 * D)
        store_tile(gates_ptr + 4 * step + 2 * D, g, rows, d, B, D, 4 * D)
        store_tile(gates_ptr + 4 * step + 3 * D, o, rows, d, B, D, 4 * D)


def lstm_forward(x, w, h0, c0):
    (T, B, width), D = x.shape, h0.shape[1]
    if width != 4 * D or w.shape != (D, 4 * D) or not h0.shape == c0.shape == (B, D):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, h0 {tuple(h0.shape)} do not fit")
    if D > 128:
        raise ValueError(f"a state of {D} does not fit one tile")
    h = torch.empty((T, B, D), device=x.device, dtype=x.dtype)
    c = torch.empty((T, B, D), device=x.device, dtype=torch.float32)
    gates = torch.empty((T, B, 4 * D), device=x.device, dtype=torch.float32)
    lstm_kernel[(triton.cdiv(B, 16),)](x, w, h0, c0, h, c, gates, T, B, D, **tiling(D))
    return h, c, gates


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def lstm(x, w, h0, c0):
    """x: (T, B, 4 D), input projections with bias; w: (D, 4 D); h0, c0: (B, D). Gives h: (T, B, D)."""
    return lstm_forward(x.contiguous(), w.contiguous(), h0.contiguous(), c0.contiguous())[0]


def reference(x, w, h0, c0):
    h, c, steps = h0, c0, []
    for x_t in x:
        i, f, g, o = (x_t + h @ w).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        steps.append(h)
    return torch.stack(steps)


SWEEP = [{"T": 256, "B": 128, "D": 128}, {"T": 501, "B": 61, "D": 96}]
SWEEP_CPU = [{"T": 7, "B": 5, "D": 16}, {"T": 3, "B": 18, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, B, D = dims["T"], dims["B"], dims["D"]
    x = torch.randn(T, B, 4 * D, device=device, dtype=dtype)
    w = torch.randn(D, 4 * D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return x, w, *(torch.randn(B, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def back_through(da, w_ptr, dh, d, D, gate, PRECISION: tl.constexpr):
    w = load_tile(w_ptr + gate * D, d, d, D, D, 4 * D)
    return tl.dot(da.to(w.dtype), tl.trans(w), dh, input_precision=PRECISION)


@triton.jit
def lstm_backward_kernel(
    w_ptr, c0_ptr, c_ptr, gates_ptr, dy_ptr, dx_ptr, dh0_ptr, dc0_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    dh_later = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    dc = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * B * D
        i = load_tile(gates_ptr + 4 * step, rows, d, B, D, 4 * D)
        f = load_tile(gates_ptr + 4 * step + D, rows, d, B, D, 4 * D)
        g = load_tile(gates_ptr + 4 * step + 2 * D, rows, d, B, D, 4 * D)
        o = load_tile(gates_ptr + 4 * step + 3 * D, rows, d, B, D, 4 * D)
        if t > 0:
            before = load_tile(c_ptr + step - B * D, rows, d, B, D, D)
        else:
            before = load_tile(c0_ptr, rows, d, B, D, D).to(tl.float32)

        dh = dh_later + load_tile(dy_ptr + step, rows, d, B, D, D).to(tl.float32)
        u = tanh(load_tile(c_ptr + step, rows, d, B, D, D))
        dc += dh * o * (1.0 - u * u)
        da_i = dc * g * i * (1.0 - i)
        da_f = dc * before * f * (1.0 - f)
        da_g = dc * i * (1.0 - g * g)
        da_o = dh * u * o * (1.0 - o)
        store_tile(dx_ptr + 4 * step, da_i, rows, d, B, D, 4 * D)
        store_tile(dx_ptr + 4 * step + D, da_f, rows, d, B, D, 4 * D)
        store_tile(dx_ptr + 4 * step + 2 * D, da_g, rows, d, B, D, 4 * D)
        store_tile(dx_ptr + 4 * step + 3 * D, da_o, rows, d, B, D, 4 * D)
        dh_later = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
        dh_later = back_through(da_i, w_ptr, dh_later, d, D, 0, PRECISION)
        dh_later = back_through(da_f, w_ptr, dh_later, d, D, 1, PRECISION)
        dh_later = back_through(da_g, w_ptr, dh_later, d, D, 2, PRECISION)
        dh_later = back_through(da_o, w_ptr, dh_later, d, D, 3, PRECISION)
        dc *= f
    store_tile(dh0_ptr, dh_later, rows, d, B, D, D)
    store_tile(dc0_ptr, dc, rows, d, B, D, D)


@triton.jit
def dw_kernel(
    h0_ptr, h_ptr, da_ptr, dw_ptr, ROWS, B, D,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dW from the rows (t, b); the state before row r is row r - B of h, or row r of h0 at t = 0."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_D, BLOCK_N], dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        r = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_R)
        inside = (r[:, None] < ROWS) & (d[None, :] < D)
        first = inside & (r[:, None] < B)
        h = tl.load(h_ptr + (r[:, None] - B) * D + d[None, :], mask=inside & (r[:, None] >= B), other=0.0)
        h += tl.load(h0_ptr + r[:, None] * D + d[None, :], mask=first, other=0.0)
        da = load_tile(da_ptr, r, n, ROWS, 4 * D, 4 * D)
        acc = tl.dot(tl.trans(h), da, acc, input_precision=PRECISION)
    store_tile(dw_ptr, acc, d, n, D, 4 * D, 4 * D)


class Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        x, w, h0, c0 = (tensor.contiguous() for tensor in inputs)
        h, c, gates = lstm_forward(x, w, h0, c0)
        ctx.save_for_backward(w, h0, c0, h, c, gates)
        return h

    @staticmethod
    def backward(ctx, dy):
        w, h0, c0, h, c, gates = ctx.saved_tensors
        T, B, D = h.shape
        dx = torch.empty((T, B, 4 * D), device=h.device, dtype=h.dtype)
        dh0, dc0 = torch.empty_like(h0), torch.empty_like(c0)
        lstm_backward_kernel[(triton.cdiv(B, 16),)](
            w, c0, c, gates, dy.contiguous(), dx, dh0, dc0, T, B, D, **tiling(D)
        )
        needs, dw = ctx.needs_input_grad, None
        if needs[1]:
            dw = torch.empty_like(w)
            dw_kernel[(triton.cdiv(D, 32), triton.cdiv(4 * D, 32))](
                h0, h, dx, dw, T * B, B, D, PRECISION=precision(), BLOCK_R=32, BLOCK_D=32, BLOCK_N=32
            )
        return dx if needs[0] else None, dw, dh0 if needs[2] else None, dc0 if needs[3] else None


def lstm_autograd(x, w, h0, c0):
    return Lstm.apply(x, w, h0, c0)
