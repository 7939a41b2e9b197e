"""Generalised mean pooling with a learned power for each channel: from average (p = 1) towards maximum.

Forward    z = max(x, eps),  S = mean over the P pixels of z^p,  y = S^(1/p)
Backward   dx_i = dy (y / S) z_i^(p-1) / P  where x_i > eps, else 0;
           log y = log(S) / p gives  dp = sum over images of dy (y / p) (mean(z^p log z) / S - log(S) / p)

Forward schedule: a program owns (image, channel) and walks its pixels; S is saved, and y follows from it.
Backward schedule: all that dx needs of the other pixels is one number, dy y / (S P), known before the walk,
so the owner of the plane makes dx pointwise and, from the same z and its logarithm, the sum of z^p log z for
dp: one read of x and no second pass. Each plane leaves one number for dp; a second kernel adds those of a
channel over the images, a tile of channels at a time.

op: gem_pool
schedule: row_reduce_correct, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 512


@triton.jit
def gem_kernel(x_ptr, p_ptr, y_ptr, S_ptr, C, P, eps, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.load(p_ptr + plane % C).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + plane * P + i, mask=i < P, other=1.0).to(tl.float32)
        z = tl.where(x > eps, x, eps)
        total += tl.where(i < P, tl.exp2(p * tl.log2(z)), 0.0)
    S = tl.sum(total, axis=0) / P
    tl.store(S_ptr + plane, S)
    tl.store(y_ptr + plane, tl.exp2(tl.log2(S) / p).to(y_ptr.dtype.element_ty))


def gem_forward(x, p, eps):
    N, C, H, W = x.shape
    if H * W < 1:
        raise ValueError("a mean needs a pixel")
    y = torch.empty((N, C), device=x.device, dtype=x.dtype)
    S = torch.empty((N, C), device=x.device, dtype=torch.float32)
    gem_kernel[(N * C,)](x, p, y, S, C, H * W, eps, BLOCK=BLOCK)
    return y, S


@autodiff(inputs_require_grad=(0, 1))
def gem_pool(x, p, eps=1e-3):
    """x: (N, C, H, W); p: (C), positive; gives (N, C)."""
    return gem_forward(x.contiguous(), p.contiguous(), eps)[0]


def reference(x, p, eps=1e-3):
    z = torch.where(x > eps, x, eps)
    return (z ** p[:, None, None]).mean(dim=(2, 3)) ** (1 / p)


SWEEP = [{"N": 64, "C": 1024, "H": 14, "W": 14}, {"N": 9, "C": 131, "H": 63, "W": 45}]
SWEEP_CPU = [{"N": 3, "C": 7, "H": 5, "W": 8}, {"N": 2, "C": 3, "H": 23, "W": 25}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Activations of a rectifier, about a quarter of them zero."""
    x = torch.randn(dims["N"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return (x + 0.7).clamp(min=0), 2 + 2 * torch.rand(dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def gem_backward_kernel(
    x_ptr, p_ptr, S_ptr, dy_ptr, dx_ptr, part_ptr, C, P, eps, BLOCK: tl.constexpr
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    p = tl.load(p_ptr + plane % C).to(tl.float32)
    S = tl.load(S_ptr + plane)
    log_S = tl.log2(S) * 0.6931471805599453
    y = tl.exp2(tl.log2(S) / p)
    dy = tl.load(dy_ptr + plane).to(tl.float32)
    share = dy * y / S / P
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + plane * P + i, mask=i < P, other=1.0).to(tl.float32)
        z = tl.where(x > eps, x, eps)
        log2_z = tl.log2(z)
        power = tl.exp2(p * log2_z)
        dx = tl.where(x > eps, share * power / z, 0.0)
        tl.store(dx_ptr + plane * P + i, dx.to(dx_ptr.dtype.element_ty), mask=i < P)
        total += tl.where(i < P, power * log2_z, 0.0)
    mean_log = tl.sum(total, axis=0) * 0.6931471805599453 / P / S
    tl.store(part_ptr + plane, dy * y / p * (mean_log - log_S / p))


@triton.jit
def power_sum_kernel(part_ptr, dp_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (c[None, :] < C)
        acc += tl.load(part_ptr + n[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(dp_ptr + c, tl.sum(acc, axis=0).to(dp_ptr.dtype.element_ty), mask=c < C)


class GemPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, eps):
        x, p = x.contiguous(), p.contiguous()
        y, S = gem_forward(x, p, eps)
        ctx.save_for_backward(x, p, S)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, p, S = ctx.saved_tensors
        (N, C, H, W), needs = x.shape, ctx.needs_input_grad
        dx, dp, part = torch.empty_like(x), None, torch.empty_like(S)
        gem_backward_kernel[(N * C,)](x, p, S, dy.contiguous(), dx, part, C, H * W, ctx.eps, BLOCK=BLOCK)
        if needs[1]:
            dp = torch.empty_like(p)
            power_sum_kernel[(triton.cdiv(C, 64),)](part, dp, N, C, BLOCK_N=16, BLOCK_C=64)
        return dx if needs[0] else None, dp, None


def gem_pool_autograd(x, p, eps=1e-3):
    return GemPool.apply(x, p, eps)
