"""Focal loss of independent yes-or-no logits, as detectors are trained with.

Forward    z' = z for a target of 1 and -z for 0,  q = sigmoid(-z') the probability of being wrong,
           l = a_t q^g log(1 + exp(-z')),  a_t = a for a target of 1 and 1 - a for 0
Backward   dq/dz' = -q (1 - q),  d log(1 + exp(-z'))/dz' = -q, so with n = log(1 + exp(-z')):
           dz = -+ dl a_t q^g (g (1 - q) n + q),  minus for a target of 1, plus for 0

Forward schedule: flat tiles. The sign of z folds the two targets into one formula.
Backward schedule: the same tiles; one read of z, the target and dl, one write of dz. q and n are made again
from z. Written with q rather than 1 - p, nothing cancels where the prediction is right and the loss
vanishes; and q^g is exp(-g log(1 + exp(z'))), which holds for a tiny q and a g that is no whole number.
softplus is written with selections, not with max(u, 0) and |u|: each of those has a kink at 0, where the
whole is smooth, and of 16 million logits a few are exactly 0.

op: focal_loss
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softplus(u):
    positive = u > 0
    return tl.where(positive, u, 0.0) + tl.log(1 + tl.exp(tl.where(positive, -u, u)))


@triton.jit
def focal_kernel(z_ptr, y_ptr, loss_ptr, n_elements, alpha, gamma, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    positive = tl.load(y_ptr + offs, mask=mask, other=0) != 0
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    right = tl.where(positive, z, -z)
    weight = tl.where(positive, alpha, 1 - alpha)
    loss = weight * tl.exp(-gamma * softplus(right)) * softplus(-right)
    tl.store(loss_ptr + offs, loss.to(loss_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def sigmoid_focal_loss(logits, targets, alpha=0.25, gamma=2.0):
    """logits: any shape; targets: int64 of the same shape, 0 or 1; gives a loss for each."""
    if logits.shape != targets.shape:
        raise ValueError("logits and targets must have one shape")
    logits, targets = logits.contiguous(), targets.contiguous()
    loss = torch.empty_like(logits)
    grid = (triton.cdiv(loss.numel(), 1024),)
    focal_kernel[grid](logits, targets, loss, loss.numel(), alpha, gamma, BLOCK=1024)
    return loss


def reference(logits, targets, alpha=0.25, gamma=2.0):
    right = torch.where(targets != 0, logits, -logits)
    weight = torch.where(targets != 0, alpha, 1 - alpha).to(logits.dtype)
    softplus = torch.nn.functional.softplus
    return weight * torch.exp(-gamma * softplus(right)) * softplus(-right)


SWEEP = [{"M": 200000, "N": 80}, {"M": 49107, "N": 91}]
SWEEP_CPU = [{"M": 33, "N": 90}, {"M": 3, "N": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["M"], dims["N"])
    targets = (torch.rand(shape, device=device) < 0.1).long()
    return 2 * torch.randn(shape, device=device, dtype=dtype), targets


# ---- backward ----


@triton.jit
def focal_backward_kernel(
    z_ptr, y_ptr, dloss_ptr, dz_ptr, n_elements, alpha, gamma, BLOCK: tl.constexpr
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    positive = tl.load(y_ptr + offs, mask=mask, other=0) != 0
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dloss = tl.load(dloss_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    right = tl.where(positive, z, -z)
    weight = tl.where(positive, -alpha, 1 - alpha)
    slope = gamma * tl.sigmoid(right) * softplus(-right) + tl.sigmoid(-right)
    dz = dloss * weight * tl.exp(-gamma * softplus(right)) * slope
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)


class SigmoidFocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, alpha, gamma):
        logits, targets = logits.contiguous(), targets.contiguous()
        ctx.save_for_backward(logits, targets)
        ctx.constants = alpha, gamma
        return sigmoid_focal_loss(logits, targets, alpha, gamma)

    @staticmethod
    def backward(ctx, dloss):
        logits, targets = ctx.saved_tensors
        dz = torch.empty_like(logits)
        focal_backward_kernel[(triton.cdiv(dz.numel(), 1024),)](
            logits, targets, dloss.contiguous(), dz, dz.numel(), *ctx.constants, BLOCK=1024
        )
        return dz, None, None, None


def sigmoid_focal_loss_autograd(logits, targets, alpha=0.25, gamma=2.0):
    return SigmoidFocalLoss.apply(logits, targets, alpha, gamma)
