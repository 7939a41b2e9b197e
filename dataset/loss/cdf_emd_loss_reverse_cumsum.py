"""Squared earth mover's distance between ordered classes, from logits (ratings, ages, depth bins).

Forward    p = softmax(z),  F_k = sum_{j <= k} (p_j - q_j),  l = sum_k F_k^2, one loss a row
Backward   p_j takes part in F_k for k >= j:  r_j = dl/dp_j = 2 sum_{k >= j} F_k;
           through the softmax, dz_j = dl p_j (r_j - sum_k p_k r_k)

Forward schedule: classes have an order and are few, so a program owns a tile of whole rows; the difference is
summed along the row in registers.
Backward schedule: the adjoint of a cumulative sum is one from the other end, and that of the softmax takes
the mean under p away, so the row is needed three times: it is in registers, rebuilt from z and q, and
nothing is saved. Scanning p - q, not p and q apart, keeps the digits of a small F: that of a good
prediction, and towards the end of the row of every prediction, as both sums tend to 1.

op: emd_loss
schedule: reverse_scan, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = 1024  # numbers in a tile


def tiling(M, K):
    """The grid and the tile of rows by classes."""
    BLOCK_K = triton.next_power_of_2(K)
    BLOCK_M = max(1, TILE // BLOCK_K)
    return (triton.cdiv(M, BLOCK_M),), {"BLOCK_M": BLOCK_M, "BLOCK_K": BLOCK_K}


@triton.jit
def difference(z_ptr, q_ptr, rows, k, M, K):
    """p and F of a tile of rows; both are 0 beyond the last class."""
    mask = (rows[:, None] < M) & (k[None, :] < K)
    offs = rows[:, None] * K + k[None, :]
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.where(k[None, :] < K, z, -float("inf"))
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return p, tl.where(k[None, :] < K, tl.cumsum(p - q, axis=1), 0.0)


@triton.jit
def emd_kernel(z_ptr, q_ptr, loss_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    _, F = difference(z_ptr, q_ptr, rows, tl.arange(0, BLOCK_K), M, K)
    tl.store(loss_ptr + rows, tl.sum(F * F, axis=1), mask=rows < M)


@autodiff(inputs_require_grad=(0,))
def emd_loss(logits, target):
    """logits: (M, K), K classes in order; target: (M, K), distributions, constants; gives (M) in float32."""
    M, K = logits.shape
    if logits.shape != target.shape or K > 4096:
        raise ValueError("logits and target have one shape, and a row of up to 4096 classes fits a tile")
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    grid, blocks = tiling(M, K)
    emd_kernel[grid](logits.contiguous(), target.contiguous(), loss, M, K, **blocks)
    return loss


def reference(logits, target):
    return (torch.softmax(logits, dim=-1) - target).cumsum(-1).pow(2).sum(-1)


SWEEP = [{"M": 262144, "K": 101}, {"M": 65537, "K": 10}]
SWEEP_CPU = [{"M": 27, "K": 33}, {"M": 130, "K": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    z, t = (2 * torch.randn(dims["M"], dims["K"], device=device) for _ in range(2))
    return z.to(dtype), torch.softmax(t, dim=-1).to(dtype)


# ---- backward ----


@triton.jit
def emd_backward_kernel(
    z_ptr, q_ptr, dloss_ptr, dz_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    p, F = difference(z_ptr, q_ptr, rows, k, M, K)
    r = tl.cumsum(2 * F, axis=1, reverse=True)
    mean = tl.sum(p * r, axis=1)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    dz = dloss[:, None] * p * (r - mean[:, None])
    mask = (rows[:, None] < M) & (k[None, :] < K)
    tl.store(dz_ptr + rows[:, None] * K + k[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)


class EMDLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        logits, target = logits.contiguous(), target.contiguous()
        ctx.save_for_backward(logits, target)
        return emd_loss(logits, target)

    @staticmethod
    def backward(ctx, dloss):
        logits, target = ctx.saved_tensors
        M, K = logits.shape
        dz = torch.empty_like(logits)
        grid, blocks = tiling(M, K)
        emd_backward_kernel[grid](logits, target, dloss.contiguous(), dz, M, K, **blocks)
        return dz, None


def emd_loss_autograd(logits, target):
    return EMDLoss.apply(logits, target)
