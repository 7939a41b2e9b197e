"""Soft argmax: the expected place under the softmax of a heatmap, one place a keypoint.

Forward    p = softmax of a heatmap x over its H W pixels;   U = sum p u,  V = sum p v,  u the column and v
           the row of a pixel
Backward   dU/dx_i = p_i (u_i - U), as for every mean under a softmax; so
           dx_i = p_i (dU (u_i - U) + dV (v_i - V))

Forward schedule: a program owns a heatmap and walks its pixels once with a running maximum; beside the sum of
the exponentials it carries their sums weighted by u and by v. p is never stored. U, V, and l = log sum exp
are kept, three numbers a heatmap.
Backward schedule: a softmax's backward usually needs the row's <dp, p> first. Here dp_i = dU u_i + dV v_i is
known in closed form, so <dp, p> = dU U + dV V is at hand before x is read. Nothing is left to reduce: the
pixels are flat tiles of any owner, p is rebuilt by one exp, and dx is written in one pass, even where
heatmaps are large and few.

op: soft_argmax
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def soft_argmax_kernel(x_ptr, place_ptr, lse_ptr, P, W, BLOCK: tl.constexpr):
    heatmap = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    sum_u = tl.zeros([BLOCK], dtype=tl.float32)
    sum_v = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + heatmap * P + i, mask=i < P, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        rescale = tl.exp(largest - larger)
        e = tl.exp(x - larger)
        total = total * rescale + e
        sum_u = sum_u * rescale + e * (i % W)
        sum_v = sum_v * rescale + e * (i // W)
        largest = larger
    norm = tl.sum(total, axis=0)
    tl.store(place_ptr + heatmap * 2, tl.sum(sum_u, axis=0) / norm)
    tl.store(place_ptr + heatmap * 2 + 1, tl.sum(sum_v, axis=0) / norm)
    tl.store(lse_ptr + heatmap, largest + tl.log(norm))


def soft_argmax_forward(x):
    H, W = x.shape[-2:]
    if H * W == 0:
        raise ValueError("a heatmap without pixels has no expected place")
    place = torch.empty((*x.shape[:-2], 2), device=x.device, dtype=torch.float32)
    lse = torch.empty(x.shape[:-2], device=x.device, dtype=torch.float32)
    soft_argmax_kernel[(lse.numel(),)](x, place, lse, H * W, W, BLOCK=1024)
    return place, lse


@autodiff(inputs_require_grad=(0,))
def soft_argmax(x):
    """x: (..., H, W); gives (..., 2) in float32, column and row in pixels."""
    return soft_argmax_forward(x.contiguous())[0]


def reference(x):
    p = torch.softmax(x.flatten(-2), dim=-1).unflatten(-1, x.shape[-2:])
    u = (p.sum(-2) * torch.arange(x.shape[-1], device=x.device)).sum(-1)
    v = (p.sum(-1) * torch.arange(x.shape[-2], device=x.device)).sum(-1)
    return torch.stack([u, v], dim=-1)


SWEEP = [{"N": 128, "K": 17, "H": 96, "W": 72}, {"N": 16, "K": 21, "H": 255, "W": 257}]
SWEEP_CPU = [{"N": 2, "K": 3, "H": 9, "W": 13}, {"N": 1, "K": 2, "H": 31, "W": 45}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(*(dims[name] for name in "NKHW"), device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def soft_argmax_backward_kernel(x_ptr, place_ptr, lse_ptr, dplace_ptr, dx_ptr, P, W, BLOCK: tl.constexpr):
    heatmap = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + heatmap * P + i, mask=i < P, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(lse_ptr + heatmap))
    from_u = tl.load(dplace_ptr + heatmap * 2) * (i % W - tl.load(place_ptr + heatmap * 2))
    from_v = tl.load(dplace_ptr + heatmap * 2 + 1) * (i // W - tl.load(place_ptr + heatmap * 2 + 1))
    dx = p * (from_u + from_v)
    tl.store(dx_ptr + heatmap * P + i, dx.to(dx_ptr.dtype.element_ty), mask=i < P)


class SoftArgmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        place, lse = soft_argmax_forward(x)
        ctx.save_for_backward(x, place, lse)
        return place

    @staticmethod
    def backward(ctx, dplace):
        x, place, lse = ctx.saved_tensors
        P, dx = x.shape[-2] * x.shape[-1], torch.empty_like(x)
        grid = (lse.numel(), triton.cdiv(P, 1024))
        soft_argmax_backward_kernel[grid](x, place, lse, dplace.contiguous(), dx, P, x.shape[-1], BLOCK=1024)
        return dx


def soft_argmax_autograd(x):
    return SoftArgmax.apply(x)
