"""Soft Dice loss of segmentation maps, the mean over images and classes.

Forward    for image n and class c, sums over pixels:  I = sum p y,  U = sum p + sum y + e,
           l_nc = 1 - (2 I + e) / U,  L = mean of l_nc over the K = N C planes
Backward   dI/dp = y and dU/dp = 1, so dp = dL (a_nc y + b_nc) with
           a_nc = -2 / (K U),  b_nc = (2 I + e) / (K U^2)

Forward schedule: planes are few and long, so their pixels are split: a program owns (plane, chunk of pixels)
and leaves I and U of it. One program a plane then adds its chunks and leaves a, b and its part of L; one
more adds those.
Backward schedule: both sums enter by two numbers a plane. dp is linear in y and does not hold p at all: the
backward reads the targets, writes dp, and p need not be kept until then. That takes one of three passes
over memory away, and the largest tensor that the loss would save.

op: dice_loss
schedule: partials_then_reduce, same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 8192  # pixels of a program


@triton.jit
def plane_parts_kernel(
    p_ptr, y_ptr, part_ptr, HW, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64) * HW
    both = tl.zeros([BLOCK], dtype=tl.float32)
    either = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        pixels = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + plane + pixels, mask=pixels < HW, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + plane + pixels, mask=pixels < HW, other=0.0).to(tl.float32)
        both += p * y
        either += p + y
    slot = part_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(slot, tl.sum(both, axis=0))
    tl.store(slot + 1, tl.sum(either, axis=0))


@triton.jit
def ratio_kernel(part_ptr, ab_ptr, loss_part_ptr, chunks, smooth, BLOCK: tl.constexpr):
    plane, K = tl.program_id(0), tl.num_programs(0)
    both = tl.zeros([BLOCK], dtype=tl.float32)
    either = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        slots = part_ptr + (plane * chunks + i) * 2
        both += tl.load(slots, mask=i < chunks, other=0.0)
        either += tl.load(slots + 1, mask=i < chunks, other=0.0)
    U = tl.sum(either, axis=0) + smooth
    ratio = (2 * tl.sum(both, axis=0) + smooth) / U
    tl.store(ab_ptr + 2 * plane, -2 / (K * U))
    tl.store(ab_ptr + 2 * plane + 1, ratio / (K * U))
    tl.store(loss_part_ptr + plane, (1 - ratio) / K)


@triton.jit
def add_kernel(part_ptr, loss_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))


def dice_forward(p, y, smooth):
    if p.shape != y.shape:
        raise ValueError("p and y must have one shape")
    K, HW = p.shape[0] * p.shape[1], p.shape[2]
    chunks = triton.cdiv(HW, CHUNK)
    part = torch.empty((K, chunks, 2), device=p.device, dtype=torch.float32)
    ab = torch.empty((K, 2), device=p.device, dtype=torch.float32)
    loss_part = torch.empty(K, device=p.device, dtype=torch.float32)
    loss = torch.empty((), device=p.device, dtype=torch.float32)
    plane_parts_kernel[(K, chunks)](p, y, part, HW, CHUNK=CHUNK, BLOCK=1024)
    ratio_kernel[(K,)](part, ab, loss_part, chunks, smooth, BLOCK=128)
    add_kernel[(1,)](loss_part, loss, K, BLOCK=128)
    return loss, ab


@autodiff(inputs_require_grad=(0,))
def dice_loss(p, y, smooth=1.0):
    """p: (N, C, pixels), probabilities; y: the same shape, targets from 0 to 1; gives a number in float32."""
    return dice_forward(p.contiguous(), y.contiguous(), smooth)[0]


def reference(p, y, smooth=1.0):
    both, either = (p * y).sum(-1), p.sum(-1) + y.sum(-1)
    return (1 - (2 * both + smooth) / (either + smooth)).mean()


SWEEP = [{"N": 8, "C": 4, "HW": 512 * 512}, {"N": 2, "C": 3, "HW": 127 * 130 * 121}]
SWEEP_CPU = [{"N": 2, "C": 4, "HW": 90}, {"N": 1, "C": 3, "HW": 8300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["N"], dims["C"], dims["HW"])
    p = torch.softmax(2 * torch.randn(shape, device=device), dim=1).to(dtype)
    return p, (torch.rand(shape, device=device) < 0.25).to(dtype)


# ---- backward ----


@triton.jit
def dice_backward_kernel(y_ptr, ab_ptr, dloss_ptr, dp_ptr, HW, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    pixels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = plane.to(tl.int64) * HW + pixels
    y = tl.load(y_ptr + offs, mask=pixels < HW, other=0.0).to(tl.float32)
    a = tl.load(ab_ptr + 2 * plane)
    b = tl.load(ab_ptr + 2 * plane + 1)
    dp = tl.load(dloss_ptr).to(tl.float32) * (a * y + b)
    tl.store(dp_ptr + offs, dp.to(dp_ptr.dtype.element_ty), mask=pixels < HW)


class DiceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, y, smooth):
        y = y.contiguous()
        loss, ab = dice_forward(p.contiguous(), y, smooth)
        ctx.save_for_backward(y, ab)
        ctx.dtype = p.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):
        y, ab = ctx.saved_tensors
        dp = torch.empty_like(y, dtype=ctx.dtype)
        N, C, HW = y.shape
        dice_backward_kernel[(N * C, triton.cdiv(HW, 2048))](y, ab, dloss, dp, HW, BLOCK=2048)
        return dp, None, None


def dice_loss_autograd(p, y, smooth=1.0):
    return DiceLoss.apply(p, y, smooth)
