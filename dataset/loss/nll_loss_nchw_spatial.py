"""Negative log-likelihood of segmentation maps, channels first, with class weights, as the weighted mean.

Forward    L = -(1 / W) sum over pixels of w_t logp[n, t, pixel],  t the pixel's class,  W = sum of w_t
Backward   dlogp[n, c, pixel] = -dL w_t / W for c = t, else 0

Forward schedule: a program owns a tile of an image's pixels and gathers one number a pixel: the target's
plane, C planes away at most, so neighbours of one class still share sectors. It leaves parts of the sum and
of W.
Backward schedule: one of C numbers of a pixel is not 0. To clear the gradient first and then set one number a
pixel would be two kernels, and the second a scatter of single numbers to sectors that were just written. Here
the owner of a tile of pixels walks the planes and stores each once, whole, by comparing the plane's number
with the targets in registers: nothing is read but the targets and the weights, and all stores run along
pixels.

op: nll_loss
schedule: index_or_seed_replay, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def nll_kernel(logp_ptr, target_ptr, w_ptr, part_ptr, C, HW, BLOCK: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + n * HW + pixels, mask=pixels < HW, other=0)
    w = tl.load(w_ptr + target, mask=pixels < HW, other=0.0).to(tl.float32)
    logp = tl.load(logp_ptr + (n * C + target) * HW + pixels, mask=pixels < HW, other=0.0).to(tl.float32)
    slot = part_ptr + 2 * (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    tl.store(slot, -tl.sum(w * logp, axis=0))
    tl.store(slot + 1, tl.sum(w, axis=0))


@triton.jit
def weighted_mean_kernel(part_ptr, loss_ptr, total_ptr, parts, BLOCK: tl.constexpr):
    loss = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        loss += tl.load(part_ptr + 2 * i, mask=i < parts, other=0.0)
        total += tl.load(part_ptr + 2 * i + 1, mask=i < parts, other=0.0)
    W = tl.sum(total, axis=0)
    tl.store(total_ptr, W)
    tl.store(loss_ptr, tl.sum(loss, axis=0) / W)


def nll_forward(logp, target, weight):
    N, C, HW = logp.shape
    if target.shape != (N, HW):
        raise ValueError("target has a class for each pixel")
    tiles = triton.cdiv(HW, BLOCK)
    part = torch.empty((N * tiles, 2), device=logp.device, dtype=torch.float32)
    loss, total = (torch.empty((), device=logp.device, dtype=torch.float32) for _ in range(2))
    nll_kernel[(tiles, N)](logp, target, weight, part, C, HW, BLOCK=BLOCK)
    weighted_mean_kernel[(1,)](part, loss, total, N * tiles, BLOCK=1024)
    return loss, total


@autodiff(inputs_require_grad=(0,))
def nll_loss(logp, target, weight):
    """logp: (N, C, pixels); target: int64 (N, pixels); weight: (C), constants; gives a number in float32."""
    return nll_forward(logp.contiguous(), target.contiguous(), weight.contiguous())[0]


def reference(logp, target, weight):
    return torch.nn.functional.nll_loss(logp, target, weight)


SWEEP = [{"N": 8, "C": 19, "HW": 512 * 1024}, {"N": 5, "C": 150, "HW": 513 * 511}]
SWEEP_CPU = [{"N": 2, "C": 7, "HW": 45}, {"N": 1, "C": 3, "HW": 1030}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, HW = dims["N"], dims["C"], dims["HW"]
    logp = torch.log_softmax(torch.randn(N, C, HW, device=device), dim=1).to(dtype)
    target = torch.randint(0, C, (N, HW), device=device)
    return logp, target, (0.2 + torch.rand(C, device=device)).to(dtype)


# ---- backward ----


@triton.jit
def nll_backward_kernel(
    target_ptr, w_ptr, total_ptr, dloss_ptr, dlogp_ptr, C, HW, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + n * HW + pixels, mask=pixels < HW, other=0)
    w = tl.load(w_ptr + target, mask=pixels < HW, other=0.0).to(tl.float32)
    grad = -w * (tl.load(dloss_ptr).to(tl.float32) / tl.load(total_ptr))
    plane = dlogp_ptr + n * C * HW + pixels
    for c in range(C):
        tl.store(plane, tl.where(target == c, grad, 0.0).to(dlogp_ptr.dtype.element_ty), mask=pixels < HW)
        plane += HW


class NLLLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, target, weight):
        target, weight = target.contiguous(), weight.contiguous()
        loss, total = nll_forward(logp.contiguous(), target, weight)
        ctx.save_for_backward(target, weight, total)
        ctx.dtype = logp.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):
        target, weight, total = ctx.saved_tensors
        (N, HW), C = target.shape, weight.numel()
        dlogp = torch.empty((N, C, HW), device=target.device, dtype=ctx.dtype)
        nll_backward_kernel[(triton.cdiv(HW, BLOCK), N)](
            target, weight, total, dloss, dlogp, C, HW, BLOCK=BLOCK
        )
        return dlogp, None, None


def nll_loss_autograd(logp, target, weight):
    return NLLLoss.apply(logp, target, weight)
