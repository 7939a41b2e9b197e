"""Cross-entropy of cosines with an additive angular margin on the target's.

Forward    u_j = k c_j for the classes j != t,  u_t = k f(c_t),  l = lse(u) - u_t, with
           f(c) = cos(acos c + a) = c cos a - sqrt(1 - c^2) sin a  where c > -cos a, else c - a sin a
Backward   df/dc = cos a + c sin a / sqrt(1 - c^2), or 1;  p_j = exp(u_j - lse):
           dc_j = dl k p_j for j != t,  dc_t = dl k (p_t - 1) df/dc

Forward schedule: a row's owner walks the classes with an online log-sum-exp, in which the target's lane is
replaced. f is needed at one place of a row, so it is made once, of a scalar, and not on every lane. 1 - c^2
is (1 - c)(1 + c), which keeps its digits near 1, and has a floor: at c = 1 the slope is infinite.
Backward schedule: (row, class tile) programs with lse saved. The slope, a division and a root, is again of
one scalar for each program; f and 1 - p_t come by it too, so a program's lanes do one exp each, and the
target's lane takes the number that was prepared for it.

op: arcface
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def with_margin(c, cos_a, sin_a, a_sin_a):
    """f(c) and df/dc; the root is constant where 1 - c^2 is below its floor."""
    square = (1 - c) * (1 + c)
    inside = square > 1e-6
    root = tl.sqrt(tl.where(inside, square, 1e-6))
    slope = tl.where(inside, cos_a + sin_a * c / root, cos_a)
    large = c > -cos_a
    return tl.where(large, c * cos_a - root * sin_a, c - a_sin_a), tl.where(large, slope, 1.0)


@triton.jit
def arcface_kernel(
    c_ptr, target_ptr, loss_ptr, lse_ptr, C, k, cos_a, sin_a, a_sin_a, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    f, _ = with_margin(tl.load(c_ptr + row * C + target).to(tl.float32), cos_a, sin_a, a_sin_a)
    m = -float("inf")
    total = 0.0
    for start in range(0, C, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        c = tl.load(c_ptr + row * C + cols, mask=cols < C, other=-float("inf")).to(tl.float32)
        u = k * tl.where(cols == target, f, c)
        m_new = tl.maximum(m, tl.max(u, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(u - m_new), axis=0)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - k * f)


def constants_of(scale, margin):
    if not (scale > 0 and 0 <= margin < math.pi / 2):
        raise ValueError("the scale is positive, and the margin an angle from 0 to pi / 2")
    return scale, math.cos(margin), math.sin(margin), margin * math.sin(margin)


def arcface_forward(cosines, target, constants):
    M, C = cosines.shape
    loss, lse = (torch.empty(M, device=cosines.device, dtype=torch.float32) for _ in range(2))
    BLOCK = min(2048, triton.next_power_of_2(C))
    arcface_kernel[(M,)](cosines, target, loss, lse, C, *constants, BLOCK=BLOCK)
    return loss, lse


@autodiff(inputs_require_grad=(0,))
def arcface(cosines, target, scale=64.0, margin=0.5):
    """cosines: (M, C), from -1 to 1; target: int64 (M); gives (M) in float32."""
    return arcface_forward(cosines.contiguous(), target.contiguous(), constants_of(scale, margin))[0]


def reference(cosines, target, scale=64.0, margin=0.5):
    c = cosines.gather(1, target[:, None])
    root = (1 - c * c).clamp(min=1e-6).sqrt()
    f = torch.where(
        c > -math.cos(margin), c * math.cos(margin) - root * math.sin(margin), c - margin * math.sin(margin)
    )
    u = scale * torch.scatter(cosines, 1, target[:, None], f)
    return torch.nn.functional.cross_entropy(u, target, reduction="none")


SWEEP = [{"M": 1024, "C": 93431}, {"M": 509, "C": 85742}]
SWEEP_CPU = [{"M": 24, "C": 80}, {"M": 3, "C": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, C = dims["M"], dims["C"]
    cosines = torch.tanh(0.4 * torch.randn(M, C, device=device, dtype=dtype))
    return cosines, torch.randint(0, C, (M,), device=device), 16.0


# ---- backward ----


@triton.jit
def arcface_backward_kernel(
    c_ptr, target_ptr, lse_ptr, dloss_ptr, dc_ptr, C, k, cos_a, sin_a, a_sin_a, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    f, slope = with_margin(tl.load(c_ptr + row * C + target).to(tl.float32), cos_a, sin_a, a_sin_a)
    of_target = (tl.exp(k * f - lse) - 1) * slope
    c = tl.load(c_ptr + row * C + cols, mask=cols < C, other=-float("inf")).to(tl.float32)
    dc = tl.load(dloss_ptr + row) * k * tl.where(cols == target, of_target, tl.exp(k * c - lse))
    tl.store(dc_ptr + row * C + cols, dc.to(dc_ptr.dtype.element_ty), mask=cols < C)


class ArcFace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cosines, target, scale, margin):
        cosines, target = cosines.contiguous(), target.contiguous()
        ctx.constants = constants_of(scale, margin)
        loss, lse = arcface_forward(cosines, target, ctx.constants)
        ctx.save_for_backward(cosines, target, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        cosines, target, lse = ctx.saved_tensors
        M, C = cosines.shape
        dc = torch.empty_like(cosines)
        BLOCK = min(2048, triton.next_power_of_2(C))
        arcface_backward_kernel[(M, triton.cdiv(C, BLOCK))](
            cosines, target, lse, dloss.contiguous(), dc, C, *ctx.constants, BLOCK=BLOCK
        )
        return dc, None, None, None


def arcface_autograd(cosines, target, scale=64.0, margin=0.5):
    return ArcFace.apply(cosines, target, scale, margin)
