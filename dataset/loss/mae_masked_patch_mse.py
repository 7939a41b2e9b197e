"""Reconstruction loss of a masked autoencoder, against patches that are normalised in the kernel.

Forward    target patch u of P numbers:  y = (u - mean u) (var u + e)^(-1/2);  k_i = 1 where it was masked;
           L = (1 / n) sum_i k_i (1 / P) sum_j (x_ij - y_ij)^2,  n = sum of k
Backward   dx_ij = (2 dL / (n P)) k_i (x_ij - y_ij)

Forward schedule: a patch is a row that fits a tile, so its owner normalises it and compares it in one go; the
normalised patches never exist in memory. A patch that was not masked, one of four, is not read. One program
adds losses and counts masks.
Backward schedule: rows again. y is made again from u, whose mean and variance are two sums over a row that is
in registers anyway; to save them, or y, would be a tensor for nothing. Rows that were not masked store zeros
and read nothing. n is saved as one number on the device, so that no value has to reach the host between the
passes.

op: mae_loss
schedule: recompute_from_stats, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def residual(x_ptr, u_ptr, row, counts, P, eps, BLOCK: tl.constexpr):
    """x - y of a patch; 0 beyond its end, and everywhere if it does not count."""
    j = tl.arange(0, BLOCK)
    mask = (j < P) & counts
    x = tl.load(x_ptr + row * P + j, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * P + j, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, u - tl.sum(u, axis=0) / P, 0.0)
    return x - centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / P + eps)


@triton.jit
def patch_loss_kernel(x_ptr, u_ptr, k_ptr, part_ptr, P, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    r = residual(x_ptr, u_ptr, row, tl.load(k_ptr + row) != 0, P, eps, BLOCK)
    tl.store(part_ptr + row, tl.sum(r * r, axis=0) / P)


@triton.jit
def masked_mean_kernel(part_ptr, k_ptr, loss_ptr, count_ptr, rows, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < rows, other=0.0)
        count += (tl.load(k_ptr + i, mask=i < rows, other=0) != 0).to(tl.int32)
    n = tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(count_ptr, n)
    tl.store(loss_ptr, tl.sum(total, axis=0) / n)


def mae_forward(x, target, masked, eps):
    P = x.shape[-1]
    if x.shape != target.shape or masked.shape != x.shape[:-1] or P > 16384:
        raise ValueError("x and target have one shape, with a mark for each patch, which fits one tile")
    part = torch.empty(masked.shape, device=x.device, dtype=torch.float32)
    loss, count = (torch.empty((), device=x.device, dtype=torch.float32) for _ in range(2))
    rows = masked.numel()
    patch_loss_kernel[(rows,)](x, target, masked, part, P, eps, BLOCK=triton.next_power_of_2(P))
    masked_mean_kernel[(1,)](part, masked, loss, count, rows, BLOCK=1024)
    return loss, count


@autodiff(inputs_require_grad=(0,))
def mae_loss(x, target, masked, eps=1e-6):
    """x, target: (..., P), patches; masked: int8 (...), 1 for those that count; gives a number in float32."""
    return mae_forward(x.contiguous(), target.contiguous(), masked.contiguous(), eps)[0]


def reference(x, target, masked, eps=1e-6):
    centred = target - target.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    counts = masked != 0
    return ((x - y).pow(2).mean(-1) * counts).sum() / counts.sum().clamp(min=1)


SWEEP = [{"N": 256, "L": 196, "P": 768}, {"N": 31, "L": 1000, "P": 1536}]
SWEEP_CPU = [{"N": 3, "L": 9, "P": 48}, {"N": 2, "L": 5, "P": 75}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["N"], dims["L"], dims["P"])
    x, target = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return x, 0.3 * target + 0.5, (torch.rand(shape[:2], device=device) < 0.75).to(torch.int8)


# ---- backward ----


@triton.jit
def patch_backward_kernel(
    x_ptr, u_ptr, k_ptr, count_ptr, dloss_ptr, dx_ptr, P, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = 2 * tl.load(dloss_ptr).to(tl.float32) / (tl.load(count_ptr) * P)
    dx = scale * residual(x_ptr, u_ptr, row, tl.load(k_ptr + row) != 0, P, eps, BLOCK)
    j = tl.arange(0, BLOCK)
    tl.store(dx_ptr + row * P + j, dx.to(dx_ptr.dtype.element_ty), mask=j < P)


class MAELoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, masked, eps):
        x, target, masked = x.contiguous(), target.contiguous(), masked.contiguous()
        loss, count = mae_forward(x, target, masked, eps)
        ctx.save_for_backward(x, target, masked, count)
        ctx.eps = eps
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, target, masked, count = ctx.saved_tensors
        dx, P = torch.empty_like(x), x.shape[-1]
        patch_backward_kernel[(masked.numel(),)](
            x, target, masked, count, dloss, dx, P, ctx.eps, BLOCK=triton.next_power_of_2(P)
        )
        return dx, None, None, None


def mae_loss_autograd(x, target, masked, eps=1e-6):
    return MAELoss.apply(x, target, masked, eps)
