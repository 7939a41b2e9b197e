"""Variance and covariance terms of VICReg: no feature shall collapse, no two shall say the same.

Forward    x = z - mean over the n samples,  V_jk = sum_m x_mj x_mk / (n - 1),  s_j = (V_jj + e)^(1/2),
           L = (1 / D) sum_j max(0, 1 - s_j) + (w / D) sum_{j != k} V_jk^2
Backward   H_jk = 4 w V_jk / (D (n - 1)) for j != k,  H_jj = -[s_j < 1] / (D (n - 1) s_j):
           dL/dx = x H.  Through the mean, dz is dL/dx less its own mean over samples; but the columns of x
           add up to 0, so those of x H do:  dz = dl (z - mean) H, and there is no mean to remove

Forward schedule: the owner of a column tile makes means, and the owner of a tile of V centres its operands as
they are loaded, stores the tile, and leaves its part of L, of either term. Squares are of centred numbers:
sum z^2 - n mean^2 would lose the variance of features that lie far from 0.
Backward schedule: both terms are one product. H is V with a factor, and with another diagonal, so it is made
from the saved V as tiles are loaded; the owner of a tile of dz (samples by features) walks the
features. The usual second pass, which takes the mean off a centred gradient, is proved away above.

op: vicreg_reg
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(z):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if z.dtype == torch.float32 else 64}


@triton.jit
def mean_kernel(z_ptr, mean_ptr, n, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, n, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        mask = (m[:, None] < n) & (d[None, :] < D)
        total += tl.load(z_ptr + m[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(mean_ptr + d, tl.sum(total, axis=0) / n, mask=d < D)


@triton.jit
def load_centred(z_ptr, mean_ptr, m, d, n, D):
    """A tile of x in z's dtype, zero outside."""
    mask = (m[:, None] < n) & (d[None, :] < D)
    z = tl.load(z_ptr + m[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)
    mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
    return tl.where(mask, z.to(tl.float32) - mean[None, :], 0.0).to(z_ptr.dtype.element_ty)


@triton.jit
def covariance_kernel(
    z_ptr, mean_ptr, v_ptr, part_ptr, n, D, weight, eps, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        m = start + tl.arange(0, BLOCK)
        left = tl.trans(load_centred(z_ptr, mean_ptr, m, j, n, D))
        v = tl.dot(left, load_centred(z_ptr, mean_ptr, m, k, n, D), v, input_precision=PRECISION)
    v /= n - 1
    inside = (j[:, None] < D) & (k[None, :] < D)
    diagonal = j[:, None] == k[None, :]
    tl.store(v_ptr + j[:, None].to(tl.int64) * D + k[None, :], v, mask=inside)
    s = tl.sqrt(tl.where(diagonal, v, 1.0) + eps)
    terms = tl.where(diagonal, tl.where(s < 1, 1 - s, 0.0), weight * v * v)
    loss = tl.sum(tl.sum(tl.where(inside, terms, 0.0), axis=1), axis=0)
    tl.store(part_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), loss / D)


@triton.jit
def add_kernel(part_ptr, loss_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))


def vicreg_forward(z, weight, eps):
    (n, D), tiles = z.shape, tiles_of(z)
    if n < 2:
        raise ValueError("a covariance wants at least two samples")
    count = triton.cdiv(D, tiles["BLOCK"])
    mean = torch.empty(D, device=z.device, dtype=torch.float32)
    v = torch.empty((D, D), device=z.device, dtype=torch.float32)
    part = torch.empty(count * count, device=z.device, dtype=torch.float32)
    loss = torch.empty((), device=z.device, dtype=torch.float32)
    mean_kernel[(triton.cdiv(D, 32),)](z, mean, n, D, BLOCK_M=64, BLOCK_D=32)
    covariance_kernel[(count, count)](z, mean, v, part, n, D, weight, eps, **tiles)
    add_kernel[(1,)](part, loss, count * count, BLOCK=1024)
    return loss, mean, v


@autodiff(inputs_require_grad=(0,))
def vicreg_reg(z, weight=0.04, eps=1e-4):
    """z: (n, D); weight: of the covariance term, beside the variance term; gives a number in float32."""
    return vicreg_forward(z.contiguous(), weight, eps)[0]


def reference(z, weight=0.04, eps=1e-4):
    n, D = z.shape
    x = z - z.mean(0)
    v = x.t() @ x / (n - 1)
    s = torch.sqrt(v.diagonal() + eps)
    off = v - torch.diag(v.diagonal())
    return (torch.where(s < 1, 1 - s, 0.0).sum() + weight * off.pow(2).sum()) / D


SWEEP = [{"n": 1024, "D": 4096}, {"n": 509, "D": 2050}]
SWEEP_CPU = [{"n": 37, "D": 32}, {"n": 70, "D": 45}]


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["n"], dims["D"], device=device) * (0.5 + torch.rand(dims["D"], device=device))
    return ((z + 0.5).to(dtype),)


# ---- backward ----


@triton.jit
def dz_kernel(
    z_ptr, mean_ptr, v_ptr, dloss_ptr, dz_ptr, n, D, weight, eps,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(dloss_ptr).to(tl.float32) / (D * (n - 1.0))
    dz = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        offs = k[:, None].to(tl.int64) * D + d[None, :]
        v = tl.load(v_ptr + offs, mask=(k[:, None] < D) & (d[None, :] < D), other=0.0)
        diagonal = k[:, None] == d[None, :]
        s = tl.sqrt(tl.where(diagonal, v, 1.0) + eps)
        h = scale * tl.where(diagonal, tl.where(s < 1, -1 / s, 0.0), 4 * weight * v)
        x = load_centred(z_ptr, mean_ptr, m, k, n, D)
        dz = tl.dot(x, h.to(x.dtype), dz, input_precision=PRECISION)
    mask = (m[:, None] < n) & (d[None, :] < D)
    offs = m[:, None].to(tl.int64) * D + d[None, :]
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)


class VICReg(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, weight, eps):
        z = z.contiguous()
        loss, mean, v = vicreg_forward(z, weight, eps)
        ctx.save_for_backward(z, mean, v)
        ctx.constants = weight, eps
        return loss

    @staticmethod
    def backward(ctx, dloss):
        z, mean, v = ctx.saved_tensors
        (n, D), tiles = z.shape, tiles_of(z)
        dz = torch.empty_like(z)
        grid = (triton.cdiv(n, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"]))
        dz_kernel[grid](z, mean, v, dloss, dz, n, D, *ctx.constants, **tiles)
        return dz, None, None


def vicreg_reg_autograd(z, weight=0.04, eps=1e-4):
    return VICReg.apply(z, weight, eps)
