"""Bias, GELU, dropout and residual addition in one pass; the mask is drawn again in the backward.

Forward    z = x + b,  y = r + m gelu(z) / (1 - p),  m = [u >= p],  u the number of (seed, position) in Philox
Backward   dr = dy;  dx = dy m gelu'(z) / (1 - p),  gelu'(z) = F(z) + z f(z), F and f the normal
           distribution's function and density;  db = sum over rows of dx

Forward schedule: 2D tiles. Four operations, of which three need no memory of their own.
Backward schedule: as in the forward, a position's number depends on seed and position alone: the owner of a
row block and a column tile draws the same mask, rebuilds gelu' from x, and stores dx. Kept for the backward
are x, b and a seed; unfused, the mask and gelu(z) would be kept too. db is the column sums of what is in
registers: a program walks its rows and leaves one row of partials, which a second kernel adds. r is not read
at all, and its gradient, a copy of dy, is stored by the program that has dy at hand.

op: bias_gelu_dropout_add
schedule: index_or_seed_replay, partials_then_reduce, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_N": 64}


@triton.jit
def keeps(seed, offs, p):
    return tl.rand(seed, offs.to(tl.int32)) >= p


@triton.jit
def fused_kernel(
    x_ptr, b_ptr, r_ptr, y_ptr, M, N, p, seed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    r = tl.load(r_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    gelu = z * 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    y = r + tl.where(keeps(seed, offs, p), gelu / (1 - p), 0.0)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_mask_kernel(mask_ptr, n_elements, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + offs, keeps(seed, offs, p).to(tl.int8), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0, 1, 2))
def bias_gelu_dropout_add(x, b, r, p, seed):
    """x, r: (M, N); b: (N); p: from 0 to below 1; seed: an integer."""
    M, N = x.shape
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    if r.shape != x.shape or x.numel() >= 2**31:
        raise ValueError("x and r must have one shape, of fewer than 2^31 positions for the generator")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"]))
    fused_kernel[grid](x.contiguous(), b.contiguous(), r.contiguous(), y, M, N, p, seed, **TILE)
    return y


def reference(x, b, r, p, seed):
    mask = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    keep_mask_kernel[(triton.cdiv(x.numel(), 512),)](mask, x.numel(), p, seed, BLOCK=512)
    return r + mask * torch.nn.functional.gelu(x + b) / (1 - p)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 44, "N": 39}, {"M": 9, "N": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x, r = (torch.randn(M, N, device=device, dtype=dtype) for _ in range(2))
    return (x, torch.randn(N, device=device, dtype=dtype), r), {"p": 0.1, "seed": 77}


# ---- backward ----

PROGRAMS = 2048  # a few for each multiprocessor


@triton.jit
def fused_backward_kernel(
    x_ptr, b_ptr, dy_ptr, dx_ptr, dr_ptr, part_ptr, M, N, p, seed, per_block, NEEDS_DR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(per_block):
        rows = (tl.program_id(0) * per_block + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) + b[None, :]
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        slope = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
        dx = tl.where(keeps(seed, offs, p), dy.to(tl.float32) / (1 - p) * slope, 0.0)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DR:
            tl.store(dr_ptr + offs, dy, mask=mask)
        total += dx
    tl.store(part_ptr + tl.program_id(0) * N + cols, tl.sum(total, axis=0), mask=cols < N)


@triton.jit
def bias_kernel(part_ptr, db_ptr, blocks, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, blocks, BLOCK_G):
        i = start + tl.arange(0, BLOCK_G)
        mask = (i[:, None] < blocks) & (cols[None, :] < N)
        total += tl.load(part_ptr + i[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(db_ptr + cols, tl.sum(total, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)


class BiasGeluDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, r, p, seed):
        x, b = x.contiguous(), b.contiguous()
        ctx.save_for_backward(x, b)
        ctx.constants = p, seed
        return bias_gelu_dropout_add(x, b, r, p, seed)

    @staticmethod
    def backward(ctx, dy):
        x, b = ctx.saved_tensors
        (M, N), needs = x.shape, ctx.needs_input_grad
        dx, db = torch.empty_like(x), None
        dr = torch.empty_like(x) if needs[2] else None
        tiles, columns = triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"])
        per_block = max(1, triton.cdiv(tiles * columns, PROGRAMS))
        blocks = triton.cdiv(tiles, per_block)
        part = torch.empty((blocks, N), device=x.device, dtype=torch.float32)
        fused_backward_kernel[(blocks, columns)](
            x, b, dy.contiguous(), dx, dr, part, M, N, *ctx.constants, per_block, NEEDS_DR=needs[2], **TILE
        )
        if needs[1]:
            db = torch.empty_like(b)
            bias_kernel[(triton.cdiv(N, 64),)](part, db, blocks, N, BLOCK_G=16, BLOCK_N=64)
        return dx if needs[0] else None, db, dr, None, None


def bias_gelu_dropout_add_autograd(x, b, r, p, seed):
    return BiasGeluDropoutAdd.apply(x, b, r, p, seed)
