"""A sparse gated unit: a row's own mean and deviation set a threshold that about one gate in twenty passes.

Forward    per row of N gates:  mu = mean a,  sd = (mean (a - mu)^2 + eps)^{1/2},  z = a - mu - c sd,
           h = max(z, 0),   y = gelu(h) u   (c = 1.645 keeps 5 % of normal numbers; gelu in its tanh form)
Backward   du = dy gelu(h),   p = dy u gelu'(h) where z > 0, 0 elsewhere, is the gradient of z;
           all z of a row lean on its two statistics, with  d mu / da_j = 1 / N,
           d sd / da_j = (a_j - mu) / (N sd):
           da_j = p_j - (1 + c (a_j - mu) / sd) sum_i p_i / N

Forward schedule: a program owns a row in one tile, makes the statistics, the threshold and the product, and
saves mu and sd, two numbers a row. A top-k by sorting would need passes; the normal quantile needs none.
Backward schedule: the same owner. Both statistics enter z with fixed coefficients, so their gradients are the
same sum over p up to a factor: one reduction gives the correction of the whole row, where a norm needs two.
z is rebuilt from a, mu and sd exactly as the forward made it, so that the same gates pass, and both gradients
are stored from the same tile. Gates below the threshold get the correction alone: they moved the statistics.

op: gaussian_topk_glu
schedule: row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


EPS = 1e-6


@triton.jit
def load_row(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gelu_and_slope(h):
    inner = 0.7978845608028654 * (h + 0.044715 * h * h * h)
    t = 2 * tl.sigmoid(2 * inner) - 1  # tanh
    slope = 0.7978845608028654 * (1 + 3 * 0.044715 * h * h)
    return 0.5 * h * (1 + t), 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * slope


@triton.jit
def gaussian_topk_kernel(a_ptr, u_ptr, y_ptr, mu_ptr, sd_ptr, N, c, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    a = load_row(a_ptr, row * N + cols, mask)
    u = load_row(u_ptr, row * N + cols, mask)
    mu = tl.sum(a, axis=0) / N
    centred = tl.where(mask, a - mu, 0.0)
    sd = tl.sqrt(tl.sum(centred * centred, axis=0) / N + eps)
    z = a - mu - c * sd
    value, _ = gelu_and_slope(tl.where(z > 0, z, 0.0))
    tl.store(y_ptr + row * N + cols, (value * u).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mu_ptr + row, mu)
    tl.store(sd_ptr + row, sd)


def gaussian_topk_forward(a, u, c):
    if a.shape != u.shape:
        raise ValueError("a and u must have one shape")
    N = a.shape[-1]
    if N > 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(a)
    mu, sd = (torch.empty(a.shape[:-1], device=a.device, dtype=torch.float32) for _ in range(2))
    BLOCK = triton.next_power_of_2(N)
    gaussian_topk_kernel[(mu.numel(),)](a, u, y, mu, sd, N, c, EPS, BLOCK=BLOCK, num_warps=8)
    return y, mu, sd


@autodiff(inputs_require_grad=(0, 1))
def gaussian_topk_glu(a, u, c=1.645):
    """a, u: (..., N), gates and values."""
    return gaussian_topk_forward(a.contiguous(), u.contiguous(), c)[0]


def reference(a, u, c=1.645):
    dtype = torch.promote_types(a.dtype, torch.float32)
    a32 = a.to(dtype)
    sd = torch.sqrt(a32.var(-1, keepdim=True, unbiased=False) + EPS)
    z = torch.relu(a32 - a32.mean(-1, keepdim=True) - c * sd)
    return (torch.nn.functional.gelu(z, approximate="tanh") * u.to(dtype)).to(a.dtype)


SWEEP = [{"M": 8192, "N": 8192}, {"M": 2047, "N": 16384}]
SWEEP_CPU = [{"M": 9, "N": 150}, {"M": 31, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, u = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return a, u, 0.75


# ---- backward ----


@triton.jit
def gaussian_topk_backward_kernel(
    a_ptr, u_ptr, mu_ptr, sd_ptr, dy_ptr, da_ptr, du_ptr, N, c, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    a = load_row(a_ptr, row * N + cols, mask)
    u = load_row(u_ptr, row * N + cols, mask)
    dy = load_row(dy_ptr, row * N + cols, mask)
    mu, sd = tl.load(mu_ptr + row), tl.load(sd_ptr + row)
    z = a - mu - c * sd
    value, slope = gelu_and_slope(tl.where(z > 0, z, 0.0))
    p = tl.where(z > 0, dy * u * slope, 0.0)
    da = p - (1 + c * (a - mu) / sd) * (tl.sum(p, axis=0) / N)
    tl.store(da_ptr + row * N + cols, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + row * N + cols, (dy * value).to(du_ptr.dtype.element_ty), mask=mask)


class GaussianTopkGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, u, c):
        a, u = a.contiguous(), u.contiguous()
        y, mu, sd = gaussian_topk_forward(a, u, c)
        ctx.save_for_backward(a, u, mu, sd)
        ctx.c = c
        return y

    @staticmethod
    def backward(ctx, dy):
        a, u, mu, sd = ctx.saved_tensors
        N, needs = a.shape[-1], ctx.needs_input_grad
        da, du = torch.empty_like(a), torch.empty_like(u)
        gaussian_topk_backward_kernel[(mu.numel(),)](
            a, u, mu, sd, dy.contiguous(), da, du, N, ctx.c, BLOCK=triton.next_power_of_2(N), num_warps=8
        )
        return da if needs[0] else None, du if needs[1] else None, None


def gaussian_topk_glu_autograd(a, u, c=1.645):
    return GaussianTopkGlu.apply(a, u, c)
