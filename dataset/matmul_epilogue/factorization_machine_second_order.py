"""Second-order term of a factorization machine: all pairs of fields, without visiting them.

Forward    S_bd = sum_f x_bf v_fd,   y_b = sum over pairs f < g of x_bf x_bg <v_f, v_g>
               = 1/2 (sum_d S_bd^2 - sum_f x_bf^2 |v_f|^2);   x (B, F), v (F, D)
Backward   dx_bf = dy_b (<S_b, v_f> - x_bf |v_f|^2),
           dv_fd = sum_b dy_b x_bf S_bd - v_fd sum_b dy_b x_bf^2

Forward schedule: a program owns a tile of samples with all D factors, and walks the fields: one dot adds to
S, and the same tile of v gives |v_f|^2 for the second sum. S is kept, D numbers a sample.
Backward schedule: with S at hand dx_bf needs its own field alone: the owner of a tile of (samples, fields)
takes one dot, S v^T, and v's row sums. dv sums over samples, tens of thousands for a few hundred fields: the
samples are split in parts, and (part, tile of fields) carries two accumulators over one walk, (dy x)^T S by
dots and the row sums of dy x^2; each part is finished with its v, as both terms are sums over samples, and
stores a slot. A second kernel adds the slots.

op: factorization_machine
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(v):
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_D": max(16, triton.next_power_of_2(v.shape[1]))}


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
def machine_kernel(
    x_ptr, v_ptr, s_ptr, y_ptr, B, F, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    b, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    s = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    alone = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        x, v = load_tile(x_ptr, b, f, B, F), load_tile(v_ptr, f, d, F, D)
        s = tl.dot(x, v, s, input_precision=PRECISION)
        x, v = x.to(tl.float32), v.to(tl.float32)
        alone += tl.sum(x * x * tl.sum(v * v, axis=1)[None, :], axis=1)
    store_tile(s_ptr, s, b, d, B, D)
    y = 0.5 * (tl.sum(s * s, axis=1) - alone)
    tl.store(y_ptr + b, y.to(y_ptr.dtype.element_ty), mask=b < B)


def machine_forward(x, v):
    (B, F), D = x.shape, v.shape[1]
    if v.shape[0] != F or D > 128:
        raise ValueError(f"x {tuple(x.shape)} and v {tuple(v.shape)}: one F, and at most 128 factors")
    s = torch.empty((B, D), device=x.device, dtype=x.dtype)
    y = torch.empty(B, device=x.device, dtype=x.dtype)
    machine_kernel[(triton.cdiv(B, 32),)](x, v, s, y, B, F, D, **tiling(v))
    return y, s


@autodiff(inputs_require_grad=(0, 1))
def factorization_machine(x, v):
    """x: (B, F), values of the fields; v: (F, D), factors of each; gives (B)."""
    return machine_forward(x.contiguous(), v.contiguous())[0]


def reference(x, v):
    return 0.5 * ((x @ v).pow(2).sum(1) - x.pow(2) @ v.pow(2).sum(1))


SWEEP = [{"B": 65536, "F": 400, "D": 64}, {"B": 20011, "F": 39, "D": 20}]
SWEEP_CPU = [{"B": 33, "F": 12, "D": 16}, {"B": 70, "F": 37, "D": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["F"], device=device, dtype=dtype) / max(1, dims["F"]) ** 0.5
    return x, torch.randn(dims["F"], dims["D"], device=device, dtype=dtype) / max(1, dims["D"]) ** 0.5


# ---- backward ----


@triton.jit
def dx_kernel(
    x_ptr, v_ptr, s_ptr, dy_ptr, dx_ptr, B, F, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = load_tile(v_ptr, f, d, F, D)
    joint = tl.dot(load_tile(s_ptr, b, d, B, D), tl.trans(v), input_precision=PRECISION)
    v = v.to(tl.float32)
    alone = load_tile(x_ptr, b, f, B, F).to(tl.float32) * tl.sum(v * v, axis=1)[None, :]
    dy = tl.load(dy_ptr + b, mask=b < B, other=0.0).to(tl.float32)
    store_tile(dx_ptr, dy[:, None] * (joint - alone), b, f, B, F)


@triton.jit
def dv_slot_kernel(
    x_ptr, v_ptr, s_ptr, dy_ptr, slots_ptr, B, F, D, part,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    f, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    slot = tl.program_id(1)
    joint = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    alone = tl.zeros([BLOCK], dtype=tl.float32)
    end = tl.minimum((slot + 1) * part, B)
    for start in range(slot * part, end, BLOCK):
        b = start + tl.arange(0, BLOCK)
        x, s = load_tile(x_ptr, b, f, end, F), load_tile(s_ptr, b, d, end, D)
        dy = tl.load(dy_ptr + b, mask=b < end, other=0.0).to(tl.float32)
        scaled = x.to(tl.float32) * dy[:, None]
        joint = tl.dot(tl.trans(scaled.to(x.dtype)), s, joint, input_precision=PRECISION)
        alone += tl.sum(scaled * x.to(tl.float32), axis=0)
    dv = joint - load_tile(v_ptr, f, d, F, D).to(tl.float32) * alone[:, None]
    store_tile(slots_ptr + slot.to(tl.int64) * F * D, dv, f, d, F, D)


@triton.jit
def sum_slots_kernel(slots_ptr, dv_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(slots):
        dv += tl.load(slots_ptr + i, mask=i < size, other=0.0)
        slots_ptr += size
    tl.store(dv_ptr + i, dv.to(dv_ptr.dtype.element_ty), mask=i < size)


class FactorizationMachine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v):
        x, v = x.contiguous(), v.contiguous()
        y, s = machine_forward(x, v)
        ctx.save_for_backward(x, v, s)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, v, s = ctx.saved_tensors
        dy, (B, F), D, tiles = dy.contiguous(), x.shape, v.shape[1], tiling(v)
        fields = triton.cdiv(F, 32)
        dx = dv = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(B, 32), fields)](x, v, s, dy, dx, B, F, D, **tiles)
        if ctx.needs_input_grad[1]:
            wanted = triton.cdiv(256, max(1, fields))  # parts, to fill a GPU
            part = max(1, triton.cdiv(B, wanted * 32)) * 32
            count = triton.cdiv(B, part)
            slots = torch.empty((count, F, D), device=x.device, dtype=torch.float32)
            dv_slot_kernel[(fields, count)](x, v, s, dy, slots, B, F, D, part, **tiles)
            dv = torch.empty_like(v)
            sum_slots_kernel[(triton.cdiv(F * D, 256),)](slots, dv, count, F * D, BLOCK=256)
        return dx, dv


def factorization_machine_autograd(x, v):
    return FactorizationMachine.apply(x, v)
