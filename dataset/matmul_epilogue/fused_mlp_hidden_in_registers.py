"""Two linear layers with a squared ReLU between; the hidden layer stays in registers.

Forward    u = x W1,  h = max(u, 0)^2,  Y = h W2
Backward   dh = dY W2^T,  du = 2 max(u, 0) * dh,  dX = du W1^T,  dW1 = x^T du,  dW2 = h^T dY

Forward schedule: the layer around the hidden one is narrow, as in the transitions of pair representations, so
a row fits in one tile. A program owns a tile of rows, walks the hidden units, and for each tile of them makes
u by a dot, squares it, and adds its product with W2 to Y. The hidden layer, four times as large as x, is
never in memory.
Backward schedule: x and dY have the same rows, so whoever has a tile of both can make any tile of u and of dh
by two dots, and then what is wanted from them by one more. The owner of rows walks the hidden units for dX,
as forward. Both weights' gradients belong to a tile of hidden units, who walks the rows; a few hundred units
are only a few tiles, so the rows are split as well, each part stores its own pair of tiles, and a last
kernel adds the parts in order. That is seven dots a tile instead of four, 6 D operations for each hidden
unit, against six passes over numbers of 2 bytes: for D = 128 some 64 operations a byte, and a GPU does a few
hundred while it reads one.

op: fused_mlp
schedule: recompute_from_stats, swap_owner, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x, w1):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles, wide rows too."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(w1.shape[0]))
    BLOCK = 32 if x.dtype == torch.float32 or BLOCK_D > 128 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D}


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
def mlp_kernel(
    x_ptr, w1_ptr, w2_ptr, y_ptr, M, D, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, rows, d, M, D)
    y = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        u = tl.dot(x, load_tile(w1_ptr, d, f, D, F), input_precision=PRECISION)
        h = tl.where(u > 0, u * u, 0.0).to(x.dtype)
        y = tl.dot(h, load_tile(w2_ptr, f, d, F, D), y, input_precision=PRECISION)
    store_tile(y_ptr, y, rows, d, M, D)


@autodiff(inputs_require_grad=(0, 1, 2))
def relu2_mlp(x, w1, w2):
    """x: (M, D), D at most 256; w1: (D, F); w2: (F, D); gives (M, D)."""
    (M, D), F = x.shape, w1.shape[1]
    if D > 256 or w1.shape != (D, F) or w2.shape != (F, D):
        raise ValueError(
            f"rows of {D} (at most 256 fit a tile) and weights {tuple(w1.shape)}, {tuple(w2.shape)}"
        )
    x, w1, w2 = x.contiguous(), w1.contiguous(), w2.contiguous()
    y, tiles = torch.empty_like(x), tiling(x, w1)
    mlp_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](x, w1, w2, y, M, D, F, **tiles)
    return y


def reference(x, w1, w2):
    return torch.relu(x @ w1).pow(2) @ w2


SWEEP = [{"M": 147456, "D": 128, "F": 512}, {"M": 20011, "D": 192, "F": 768}]
SWEEP_CPU = [{"M": 37, "D": 32, "F": 70}, {"M": 130, "D": 20, "F": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, F = dims["M"], dims["D"], dims["F"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    w1 = torch.randn(D, F, device=device, dtype=dtype) / max(1, D) ** 0.5
    return x, w1, torch.randn(F, D, device=device, dtype=dtype) / max(1, F) ** 0.5


# ---- backward ----


@triton.jit
def hidden_tile(x, dy, w1_ptr, w2_ptr, f, d, D, F, PRECISION: tl.constexpr):
    """The tiles of h and du of the rows of x and dy, and hidden units f; also the tile of W1."""
    w1 = load_tile(w1_ptr, d, f, D, F)
    u = tl.dot(x, w1, input_precision=PRECISION)
    dh = tl.dot(dy, tl.trans(load_tile(w2_ptr, f, d, F, D)), input_precision=PRECISION)
    active = tl.where(u > 0, u, 0.0)
    return (active * active).to(x.dtype), (2 * active * dh).to(x.dtype), w1


@triton.jit
def dx_kernel(
    x_ptr, w1_ptr, w2_ptr, dy_ptr, dx_ptr, M, D, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    x, dy = load_tile(x_ptr, rows, d, M, D), load_tile(dy_ptr, rows, d, M, D)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        _, du, w1 = hidden_tile(x, dy, w1_ptr, w2_ptr, f, d, D, F, PRECISION)
        dx = tl.dot(du, tl.trans(w1), dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, rows, d, M, D)


@triton.jit
def weight_slot_kernel(
    x_ptr, w1_ptr, w2_ptr, dy_ptr, slots_ptr, M, D, F, part,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles of dW1^T and of dW2, both (F, D), from one part of the rows."""
    f, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    slot = tl.program_id(1)
    dw1 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dw2 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, M), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x, dy = load_tile(x_ptr, rows, d, M, D), load_tile(dy_ptr, rows, d, M, D)
        h, du, _ = hidden_tile(x, dy, w1_ptr, w2_ptr, f, d, D, F, PRECISION)
        dw1 = tl.dot(tl.trans(du), x, dw1, input_precision=PRECISION)
        dw2 = tl.dot(tl.trans(h), dy, dw2, input_precision=PRECISION)
    store_tile(slots_ptr + slot * 2 * F * D, dw1, f, d, F, D)
    store_tile(slots_ptr + (slot * 2 + 1) * F * D, dw2, f, d, F, D)


@triton.jit
def sum_slots_kernel(slots_ptr, dw1_ptr, dw2_ptr, slots, D, F, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw1 = tl.zeros([BLOCK], dtype=tl.float32)
    dw2 = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw1 += tl.load(slots_ptr + slot * 2 * F * D + i, mask=i < F * D, other=0.0)
        dw2 += tl.load(slots_ptr + (slot * 2 + 1) * F * D + i, mask=i < F * D, other=0.0)
    tl.store(dw1_ptr + i % D * F + i // D, dw1.to(dw1_ptr.dtype.element_ty), mask=i < F * D)
    tl.store(dw2_ptr + i, dw2.to(dw2_ptr.dtype.element_ty), mask=i < F * D)


class ReLU2MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2):
        x, w1, w2 = x.contiguous(), w1.contiguous(), w2.contiguous()
        ctx.save_for_backward(x, w1, w2)
        return relu2_mlp(x, w1, w2)

    @staticmethod
    def backward(ctx, dy):
        x, w1, w2 = ctx.saved_tensors
        dy = dy.contiguous()
        (M, D), F, tiles = x.shape, w1.shape[1], tiling(x, w1)
        BLOCK = tiles["BLOCK"]
        needs = ctx.needs_input_grad
        dx = dw1 = dw2 = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, BLOCK),)](x, w1, w2, dy, dx, M, D, F, **tiles)
        if needs[1] or needs[2]:
            across = triton.cdiv(F, BLOCK)
            wanted = triton.cdiv(256, max(1, across))  # parts, to fill a GPU
            part = triton.cdiv(max(M, 1), wanted * BLOCK) * BLOCK
            count = triton.cdiv(M, part)
            slots = torch.empty((count, 2, F, D), device=x.device, dtype=torch.float32)
            weight_slot_kernel[(across, count)](x, w1, w2, dy, slots, M, D, F, part, **tiles)
            dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
            sum_slots_kernel[(triton.cdiv(F * D, 256),)](slots, dw1, dw2, count, D, F, BLOCK=256)
        return dx, dw1 if needs[1] else None, dw2 if needs[2] else None


def relu2_mlp_autograd(x, w1, w2):
    return ReLU2MLP.apply(x, w1, w2)
