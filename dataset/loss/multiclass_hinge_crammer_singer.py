"""Multiclass hinge loss (Crammer and Singer): the target's score against the best of the others.

Forward    k the first class other than t with the largest score,  l = max(0, 1 + z_k - z_t), one loss a row
Backward   where l > 0:  dz_k = dl,  dz_t = -dl, and 0 elsewhere; where l = 0 all of the row is 0

Forward schedule: a row's owner walks it with the maximum of the other classes and its place.
Backward schedule: of a row two numbers are not 0, at places that are known: t, and k, which the forward
saved, as -1 where the margin is met. So the backward reads neither logits nor losses: a program owns (row,
column tile) and stores a whole tile, made of the upstream and two comparisons. Clearing the tensor and
scattering two numbers a row after it would write sectors twice, for one word of use each.

op: multiclass_hinge
schedule: index_or_seed_replay
difficulty: 1
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def hinge_kernel(z_ptr, target_ptr, loss_ptr, rival_ptr, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    best = -float("inf")
    rival = 0
    for start in range(0, C, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * C + cols, mask=cols < C, other=-float("inf")).to(tl.float32)
        z = tl.where(cols == target, -float("inf"), z)
        value, index = tl.max(z, axis=0, return_indices=True)
        rival = tl.where(value > best, start + index, rival)
        best = tl.maximum(best, value)
    z_rival = tl.load(z_ptr + row * C + rival).to(tl.float32)
    loss = 1 + z_rival - tl.load(z_ptr + row * C + target).to(tl.float32)
    tl.store(rival_ptr + row, tl.where(loss > 0, rival, -1))
    tl.store(loss_ptr + row, tl.where(loss > 0, loss, 0.0))


def hinge_forward(logits, target):
    M, C = logits.shape
    if C < 2:
        raise ValueError("there is no other class")
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    rival = torch.empty(M, device=logits.device, dtype=torch.int32)
    hinge_kernel[(M,)](logits, target, loss, rival, C, BLOCK=min(2048, triton.next_power_of_2(C)))
    return loss, rival


@autodiff(inputs_require_grad=(0,))
def multiclass_hinge(logits, target):
    """logits: (M, C); target: int64 (M); gives (M) in float32."""
    return hinge_forward(logits.contiguous(), target.contiguous())[0]


def reference(logits, target):
    others = logits.scatter(1, target[:, None], -torch.inf)
    loss = 1 + others.max(1).values - logits.gather(1, target[:, None])[:, 0]
    return torch.where(loss > 0, loss, 0.0)


SWEEP = [{"M": 65536, "C": 1000}, {"M": 4099, "C": 21841}]
SWEEP_CPU = [{"M": 36, "C": 23}, {"M": 3, "C": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """The target's score is mostly the largest, so that many rows meet the margin and many do not."""
    M, C = dims["M"], dims["C"]
    logits = torch.randn(M, C, device=device, dtype=dtype)
    target = torch.randint(0, C, (M,), device=device)
    return logits.scatter_add(1, target[:, None], 4 * torch.ones_like(logits[:, :1])), target


# ---- backward ----


@triton.jit
def hinge_backward_kernel(target_ptr, rival_ptr, dloss_ptr, dz_ptr, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rival = tl.load(rival_ptr + row)
    dloss = tl.where(rival >= 0, tl.load(dloss_ptr + row), 0.0)
    dz = tl.where(cols == rival, dloss, tl.where(cols == tl.load(target_ptr + row), -dloss, 0.0))
    tl.store(dz_ptr + row * C + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < C)


class MulticlassHinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        target = target.contiguous()
        loss, rival = hinge_forward(logits.contiguous(), target)
        ctx.save_for_backward(target, rival)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):
        target, rival = ctx.saved_tensors
        M, C = ctx.shape
        dz = torch.empty((M, C), device=target.device, dtype=ctx.dtype)
        hinge_backward_kernel[(M, triton.cdiv(C, 1024))](target, rival, dloss.contiguous(), dz, C, BLOCK=1024)
        return dz, None


def multiclass_hinge_autograd(logits, target):
    return MulticlassHinge.apply(logits, target)
