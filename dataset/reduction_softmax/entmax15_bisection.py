"""Entmax with alpha = 1.5: a softmax whose small entries are exactly zero.

Forward    z = x / 2,  y_i = (z_i - t)^2 where z_i > t and 0 elsewhere, with t such that sum y = 1
Backward   S = {i: z_i > t} is piecewise constant. With s = z - t = sqrt(y) on S and 0 elsewhere, sum s^2 = 1
           gives sum s (dz - dt) = 0, dt = sum s dz / sum s, and so, as z = x / 2,
           dx_i = s_i (dy_i - sum s dy / sum s)

Forward schedule: a program owns a row in one tile. The largest z is shifted to 0, where t lies in [-1, 0);
thirty bisections in registers find the support, no sort. They only compare, so t itself is then solved from
the support's quadratic: with mean m and deviations d = sum (z - m)^2 over k lanes, t = m - sqrt((1 - d) / k),
which is exact, and is what the gradient above differentiates.
Backward schedule: the same owner, and no iteration: y holds all that is left of the search, s is its root.
Two sums in registers, then the correction: two reads and one write, as softmax, whose weights y are sqrt(y)
here.

op: entmax
schedule: row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def entmax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=-float("inf")).to(tl.float32)
    z = (x - tl.max(x, axis=0)) * 0.5
    low = tl.max(z, axis=0) - 1
    step = 0.5
    for _ in range(30):
        over = tl.where(z > low + step, z - (low + step), 0.0)
        low = tl.where(tl.sum(over * over, axis=0) > 1, low + step, low)
        step = step * 0.5
    support = z > low
    k = tl.sum(tl.where(support, 1.0, 0.0), axis=0)
    m = tl.sum(tl.where(support, z, 0.0), axis=0) / k
    centred = tl.where(support, z - m, 0.0)
    t = m - tl.sqrt((1 - tl.sum(centred * centred, axis=0)) / k)
    s = tl.where(support & (z > t), z - t, 0.0)
    tl.store(y_ptr + row * N + cols, (s * s).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def entmax15(x):
    """x: (..., N); gives rows that are not negative and of sum 1."""
    x, N = x.contiguous(), x.shape[-1]
    if not 1 <= N <= 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    entmax_kernel[(x.numel() // N,)](x, y, N, BLOCK=triton.next_power_of_2(N))
    return y


def reference(x):
    z = (x - x.amax(-1, keepdim=True)) / 2
    ranked = z.sort(dim=-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=x.device)
    m = ranked.cumsum(-1) / k
    left = 1 - (ranked.pow(2).cumsum(-1) - k * m * m)  # what the first k lanes leave of the sum
    t = m - torch.sqrt(torch.where(left > 0, left, 1.0) / k)
    size = ((left > 0) & (ranked > t)).sum(-1, keepdim=True)
    return torch.relu(z - t.gather(-1, size - 1)).pow(2)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1000}]
SWEEP_CPU = [{"M": 19, "N": 47}, {"M": 60, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def entmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    s = tl.sqrt(tl.load(y_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32))
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    dx = s * (dy - tl.sum(s * dy, axis=0) / tl.sum(s, axis=0))
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Entmax15(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = entmax15(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        N, dx = y.shape[-1], torch.empty_like(y)
        grid = (y.numel() // N,)
        entmax_backward_kernel[grid](y, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))
        return dx


def entmax15_autograd(x):
    return Entmax15.apply(x)
