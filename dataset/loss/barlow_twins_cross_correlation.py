"""Redundancy reduction between two views (Barlow Twins): their cross-correlation shall be the identity.

Forward    C = A^T B / n,  A, B (n, D) standardised columns,  L = sum_i (C_ii - 1)^2 + k sum_{i != j} C_ij^2
Backward   E_ij = (dl / n) 2 (C_ii - 1) on the diagonal, (dl / n) 2 k C_ij off it; as C_ij is the sum of
           A_mi B_mj / n over samples m:  dA = B E^T,  dB = A E

Forward schedule: a program owns a tile of C, walks the samples, stores the tile and its part of L. Features
are many and samples few (D = 8192, n = 2048), so the tiles of C are what fills the device.
Backward schedule: C is saved, since it is a whole product to make again, but E is not: it is C with another
diagonal and a factor, which costs nothing as a tile is loaded. The two gradients are one kernel, launched
twice: the owner of a tile (samples, features) of dA walks C by rows and multiplies with B, of dB by columns
and with A. A stride for each direction is all that differs, so no transpose is stored.

op: barlow_twins
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def correlation_kernel(
    a_ptr, b_ptr, c_ptr, part_ptr, n, D, weight, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        m = start + tl.arange(0, BLOCK)
        a = tl.trans(load_tile(a_ptr, m, i, n, D))
        c = tl.dot(a, load_tile(b_ptr, m, j, n, D), c, input_precision=PRECISION)
    c /= n
    inside = (i[:, None] < D) & (j[None, :] < D)
    tl.store(c_ptr + i[:, None].to(tl.int64) * D + j[None, :], c, mask=inside)
    terms = tl.where(i[:, None] == j[None, :], (c - 1) * (c - 1), weight * c * c)
    loss = tl.sum(tl.sum(tl.where(inside, terms, 0.0), axis=1), axis=0)
    tl.store(part_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), loss)


@triton.jit
def add_kernel(part_ptr, loss_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))


def barlow_forward(a, b, weight):
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    (n, D), tiles = a.shape, tiles_of(a)
    count = triton.cdiv(D, tiles["BLOCK"])
    c = torch.empty((D, D), device=a.device, dtype=torch.float32)
    part = torch.empty(count * count, device=a.device, dtype=torch.float32)
    loss = torch.empty((), device=a.device, dtype=torch.float32)
    correlation_kernel[(count, count)](a, b, c, part, n, D, weight, **tiles)
    add_kernel[(1,)](part, loss, count * count, BLOCK=1024)
    return loss, c


@autodiff(inputs_require_grad=(0, 1))
def barlow_twins(a, b, weight=0.005):
    """a, b: (n, D), standardised over the samples; gives one number in float32."""
    return barlow_forward(a.contiguous(), b.contiguous(), weight)[0]


def reference(a, b, weight=0.005):
    c = a.t() @ b / a.shape[0]
    on_diagonal = torch.eye(a.shape[1], device=a.device, dtype=torch.bool)
    return torch.where(on_diagonal, (c - 1) ** 2, weight * c**2).sum()


SWEEP = [{"n": 1024, "D": 4096}, {"n": 509, "D": 2050}]
SWEEP_CPU = [{"n": 40, "D": 48}, {"n": 33, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    common = torch.randn(dims["n"], dims["D"], device=device)
    a, b = ((0.8 * common + 0.6 * torch.randn_like(common)).to(dtype) for _ in range(2))
    return a, b


# ---- backward ----


@triton.jit
def view_kernel(
    other_ptr, c_ptr, dloss_ptr, grad_ptr, n, D, own_stride, other_stride, weight,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one view: the other one times E, whose sides have these strides in memory."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = 2 * tl.load(dloss_ptr).to(tl.float32) / n
    grad = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        offs = k[:, None].to(tl.int64) * other_stride + own[None, :].to(tl.int64) * own_stride
        c = tl.load(c_ptr + offs, mask=(k[:, None] < D) & (own[None, :] < D), other=0.0)
        e = scale * tl.where(k[:, None] == own[None, :], c - 1, weight * c)
        x = load_tile(other_ptr, m, k, n, D)
        grad = tl.dot(x, e.to(x.dtype), grad, input_precision=PRECISION)
    mask = (m[:, None] < n) & (own[None, :] < D)
    offs = m[:, None].to(tl.int64) * D + own[None, :]
    tl.store(grad_ptr + offs, grad.to(grad_ptr.dtype.element_ty), mask=mask)


class BarlowTwins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, weight):
        a, b = a.contiguous(), b.contiguous()
        loss, c = barlow_forward(a, b, weight)
        ctx.save_for_backward(a, b, c)
        ctx.weight = weight
        return loss

    @staticmethod
    def backward(ctx, dloss):
        a, b, c = ctx.saved_tensors
        (n, D), tiles = a.shape, tiles_of(a)
        grid = (triton.cdiv(n, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"]))
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            view_kernel[grid](b, c, dloss, da, n, D, D, 1, ctx.weight, **tiles)
        if ctx.needs_input_grad[1]:
            db = torch.empty_like(b)
            view_kernel[grid](a, c, dloss, db, n, D, 1, D, ctx.weight, **tiles)
        return da, db, None


def barlow_twins_autograd(a, b, weight=0.005):
    return BarlowTwins.apply(a, b, weight)
