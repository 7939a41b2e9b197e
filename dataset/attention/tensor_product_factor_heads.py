"""Tensor-product attention's heads from their factors: a token's queries as a sum of R outer products.

Forward    y_hd = (1 / R) sum_{r < R} a_rh b_rd      for each token; H heads, D channels, R a few
Backward   da_rh = (1 / R) sum_d dy_hd b_rd,   db_rd = (1 / R) sum_h dy_hd a_rh

Forward schedule: the factors are R (H + D) numbers a token, y is H D. A program owns a token: it keeps the
whole H x D tile in registers, adds R outer products, and stores once.
Backward schedule: both gradients are sums over dy, one along its rows and one along its columns, and dy is
the large tensor: so the same owner loads it once, keeps it in registers, and takes both sums for each r, with
the factors of the token loaded again, which are small. As two batched products, a times dy and b times dy,
dy would be read twice, and R is too small a dimension for tensor cores. Every token has its own factors:
nothing is summed over programs.

op: tensor_product_heads
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_row(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def factor_heads_kernel(a_ptr, b_ptr, y_ptr, R, H, D, scale, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    y = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    for r in range(R):
        a = load_row(a_ptr + (token * R + r) * H, h, H)
        b = load_row(b_ptr + (token * R + r) * D, d, D)
        y += a[:, None] * b[None, :]
    mask = (h < H)[:, None] & (d < D)[None, :]
    offs = token * H * D + h[:, None] * D + d[None, :]
    tl.store(y_ptr + offs, (y * scale).to(y_ptr.dtype.element_ty), mask=mask)


def blocks(a, b):
    return {"BLOCK_H": triton.next_power_of_2(a.shape[2]), "BLOCK_D": triton.next_power_of_2(b.shape[2])}


@autodiff(inputs_require_grad=(0, 1))
def factor_heads(a, b):
    """a: (T, R, H); b: (T, R, D); gives (T, H, D)."""
    a, b = a.contiguous(), b.contiguous()
    (T, R, H), D = a.shape, b.shape[2]
    if b.shape[:2] != a.shape[:2]:
        raise ValueError("a and b must have the same tokens and rank")
    tiles = blocks(a, b)
    if tiles["BLOCK_H"] * tiles["BLOCK_D"] > 16384:
        raise ValueError(f"{H} heads of {D} channels do not fit one tile")
    y = torch.empty((T, H, D), device=a.device, dtype=a.dtype)
    factor_heads_kernel[(T,)](a, b, y, R, H, D, 1 / R, **tiles)
    return y


def reference(a, b):
    return torch.einsum("trh,trd->thd", a, b) / a.shape[1]


SWEEP = [{"T": 16384, "R": 6, "H": 32, "D": 64}, {"T": 8191, "R": 2, "H": 24, "D": 128}]
SWEEP_CPU = [{"T": 13, "R": 3, "H": 6, "D": 20}, {"T": 5, "R": 2, "H": 16, "D": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, R, H, D = (dims[name] for name in ("T", "R", "H", "D"))
    a = torch.randn(T, R, H, device=device, dtype=dtype)
    return a, torch.randn(T, R, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def factor_heads_backward_kernel(
    a_ptr, b_ptr, dy_ptr, da_ptr, db_ptr, R, H, D, scale, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (h < H)[:, None] & (d < D)[None, :]
    offs = token * H * D + h[:, None] * D + d[None, :]
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32) * scale
    for r in range(R):
        row_a, row_b = (token * R + r) * H, (token * R + r) * D
        da = tl.sum(dy * load_row(b_ptr + row_b, d, D)[None, :], axis=1)
        db = tl.sum(dy * load_row(a_ptr + row_a, h, H)[:, None], axis=0)
        tl.store(da_ptr + row_a + h, da.to(da_ptr.dtype.element_ty), mask=h < H)
        tl.store(db_ptr + row_b + d, db.to(db_ptr.dtype.element_ty), mask=d < D)


class FactorHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return factor_heads(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        (T, R, H), D = a.shape, b.shape[2]
        da, db = torch.empty_like(a), torch.empty_like(b)
        factor_heads_backward_kernel[(T,)](a, b, dy.contiguous(), da, db, R, H, D, 1 / R, **blocks(a, b))
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def factor_heads_autograd(a, b):
    return FactorHeads.apply(a, b)
