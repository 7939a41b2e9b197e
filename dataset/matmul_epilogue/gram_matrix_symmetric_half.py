"""Gram matrix of columns; symmetric, so half of its tiles are computed.

Forward    G = X^T X
Backward   dG need not be symmetric. G_de = sum_m X_md X_me gives dX_md = sum_e (dG_de + dG_ed) X_me:
           dX = X (dG + dG^T)

Forward schedule: a program owns a tile on or above the diagonal, walks the rows of X, and stores the tile
and, off the diagonal, its mirror image. Row i of the tiles has T - i of them, rows i and T - 1 - i together
T + 1: so the grid is a full rectangle of about T / 2 by T + 1, each program finds its tile by a comparison,
and the triangle needs no square root. Tiles beside the diagonal are each other's transpose to the last bit.
Backward schedule: dX has owners of its own tiles, one product as large as the whole G. They walk e and load
two tiles of dG a step, (d, e) and (e, d), whose sum is the operand: dG + dG^T is never stored, which would
cost two passes over D^2 numbers, and the two products X dG and X dG^T are one.

op: gram
schedule: swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


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
def gram_kernel(x_ptr, g_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.cdiv(D, BLOCK)
    row, place = tl.program_id(0), tl.program_id(1)
    mirror_row = tiles - 1 - row
    upper = place < tiles - row
    if upper | (row != mirror_row):  # the middle row of an odd number has no partner
        i = tl.where(upper, row, mirror_row)
        j = tl.where(upper, row + place, place - 1)
        d, e = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
        g = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for start in range(0, M, BLOCK):
            m = start + tl.arange(0, BLOCK)
            left = tl.trans(load_tile(x_ptr, m, d, M, D))
            g = tl.dot(left, load_tile(x_ptr, m, e, M, D), g, input_precision=PRECISION)
        store_tile(g_ptr, g, d, e, D, D)
        if i != j:
            store_tile(g_ptr, tl.trans(g), e, d, D, D)


@autodiff(inputs_require_grad=(0,))
def gram_matrix(x):
    """x: (M, D); gives (D, D), the products of its columns with each other."""
    x, (M, D), tiles = x.contiguous(), x.shape, tiling(x)
    g = torch.empty((D, D), device=x.device, dtype=x.dtype)
    count = triton.cdiv(D, tiles["BLOCK"])
    gram_kernel[(triton.cdiv(count, 2), count + 1)](x, g, M, D, **tiles)
    return g


def reference(x):
    return x.t() @ x


SWEEP = [{"M": 8192, "D": 2048}, {"M": 1021, "D": 1500}]
SWEEP_CPU = [{"M": 70, "D": 45}, {"M": 9, "D": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D = dims["M"], dims["D"]
    return (torch.randn(M, D, device=device, dtype=dtype) / max(1, M) ** 0.25,)


# ---- backward ----


@triton.jit
def dx_kernel(x_ptr, dg_ptr, dx_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        e = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, m, e, M, D)
        below = load_tile(dg_ptr, e, d, D, D).to(tl.float32)
        both = below + tl.trans(load_tile(dg_ptr, d, e, D, D)).to(tl.float32)
        dx = tl.dot(x, both.to(x.dtype), dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, m, d, M, D)


class GramMatrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return gram_matrix(x)

    @staticmethod
    def backward(ctx, dg):
        (x,) = ctx.saved_tensors
        (M, D), tiles = x.shape, tiling(x)
        dx = torch.empty_like(x)
        grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"]))
        dx_kernel[grid](x, dg.contiguous(), dx, M, D, **tiles)
        return dx


def gram_matrix_autograd(x):
    return GramMatrix.apply(x)
