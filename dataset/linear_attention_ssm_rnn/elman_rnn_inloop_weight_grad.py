"""Elman RNN of a large batch and a small state, the weight's gradient summed inside the walk.

Forward    h_t = tanh(x_t + h_{t-1} U)
           (x_t, h_t: (B, D), the input projection made outside; U: (D, D))
Backward   with dh = dy_t + (from t+1):   da_t = dh * (1 - h_t^2),   dx_t = da_t,   to t-1:  da_t U^T,
           dU = sum over t and rows of h_{t-1}^T da_t;   what is left for t = -1 is dh0

Forward schedule: the rows of the batch are independent: a program owns a tile of them and walks time, h in
registers and U loaded once, before the loop.
Backward schedule: the same owners in reverse, U transposed loaded once. h_{t-1} has to be loaded for tanh' of
the next step, da_t is in registers, so their product is one dot beside the serial one and needs no load: dU
of the tile's rows adds up in D x D registers over all of time, goes to a slot of the tile, and a second
kernel adds the slots. A product over (t, b) after the walk would read h and dx once more, T B D numbers each;
it is the better choice where D x D accumulators do not fit, or where few rows make few programs.

op: elman_rnn
schedule: reverse_scan, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(D):
    """Tiles, the precision of dots, and warps: whole float32 operands take many registers."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {
        "PRECISION": PRECISION,
        "BLOCK_B": 16,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "num_warps": 8,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def elman_kernel(
    x_ptr, u_ptr, h0_ptr, h_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    u = load_tile(u_ptr, d, d, D, D)
    h = load_tile(h0_ptr, rows, d, B, D).to(tl.float32)
    for t in range(T):
        step = tl.cast(t, tl.int64) * B * D
        x = load_tile(x_ptr + step, rows, d, B, D).to(tl.float32)
        a = tl.dot(h.to(u.dtype), u, x, input_precision=PRECISION)
        h = 2.0 * tl.sigmoid(2.0 * a) - 1.0  # tanh
        store_tile(h_ptr + step, h, rows, d, B, D)


@autodiff(inputs_require_grad=(0, 1, 2))
def elman(x, u, h0):
    """x: (T, B, D); u: (D, D); h0: (B, D). Gives h: (T, B, D)."""
    x, u, h0 = x.contiguous(), u.contiguous(), h0.contiguous()
    T, B, D = x.shape
    if u.shape != (D, D) or h0.shape != (B, D):
        raise ValueError(f"x {tuple(x.shape)}, u {tuple(u.shape)}, h0 {tuple(h0.shape)} do not fit")
    if D > 64:
        raise ValueError(f"a state of {D} is too wide to sum its weight's gradient in registers")
    h, tiles = torch.empty_like(x), tiling(D)
    elman_kernel[(triton.cdiv(B, tiles["BLOCK_B"]),)](x, u, h0, h, T, B, D, **tiles)
    return h


def reference(x, u, h0):
    h, steps = h0, []
    for x_t in x:
        h = torch.tanh(x_t + h @ u)
        steps.append(h)
    return torch.stack(steps)


SWEEP = [{"T": 128, "B": 4096, "D": 64}, {"T": 201, "B": 1021, "D": 40}]
SWEEP_CPU = [{"T": 7, "B": 20, "D": 16}, {"T": 3, "B": 5, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, B, D = dims["T"], dims["B"], dims["D"]
    u = torch.randn(D, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    x, h0 = torch.randn(T, B, D, device=device, dtype=dtype), torch.randn(B, D, device=device, dtype=dtype)
    return x, u, h0


# ---- backward ----


@triton.jit
def elman_backward_kernel(
    u_ptr, h0_ptr, h_ptr, dy_ptr, dx_ptr, slots_ptr, dh0_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    ut = tl.trans(load_tile(u_ptr, d, d, D, D))
    du = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)
    dh = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    known = B * (T > 0)  # of no steps there is no last state
    h = load_tile(h_ptr + tl.cast(T - 1, tl.int64) * B * D, rows, d, known, D)
    for back in range(T):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * B * D
        if t > 0:
            before = load_tile(h_ptr + step - B * D, rows, d, B, D)
        else:
            before = load_tile(h0_ptr, rows, d, B, D)
        h32 = h.to(tl.float32)
        da = (dh + load_tile(dy_ptr + step, rows, d, B, D).to(tl.float32)) * (1.0 - h32 * h32)
        store_tile(dx_ptr + step, da, rows, d, B, D)
        da = da.to(ut.dtype)
        du = tl.dot(tl.trans(before), da, du, input_precision=PRECISION)
        dh = tl.dot(da, ut, input_precision=PRECISION)
        h = before
    store_tile(dh0_ptr, dh, rows, d, B, D)
    store_tile(slots_ptr + tl.program_id(0).to(tl.int64) * D * D, du, d, d, D, D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


class Elman(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, h0):
        u, h0 = u.contiguous(), h0.contiguous()
        h = elman(x, u, h0)
        ctx.save_for_backward(u, h0, h)
        return h

    @staticmethod
    def backward(ctx, dy):
        u, h0, h = ctx.saved_tensors
        (T, B, D), tiles = h.shape, tiling(h.shape[2])
        batch_tiles = triton.cdiv(B, tiles["BLOCK_B"])
        dx, dh0 = torch.empty_like(h), torch.empty_like(h0)
        slots = torch.empty((batch_tiles, D, D), device=u.device, dtype=torch.float32)
        elman_backward_kernel[(batch_tiles,)](u, h0, h, dy.contiguous(), dx, slots, dh0, T, B, D, **tiles)
        du, needs = None, ctx.needs_input_grad
        if needs[1]:
            du = torch.empty_like(u)
            sum_slots_kernel[(triton.cdiv(D * D, 64),)](slots, du, batch_tiles, D * D, BLOCK=64)
        return dx if needs[0] else None, du, dh0 if needs[2] else None


def elman_autograd(x, u, h0):
    return Elman.apply(x, u, h0)
