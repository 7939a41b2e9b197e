"""Maximum over the last axis; equal largest values share the gradient.

Forward    m = max_j x_j,   T = {j: x_j = m},   y = (1 / |T|) sum over T of x, which is m
Backward   T is piecewise constant:   dx_j = dy / |T| for j in T, and 0 elsewhere

Forward schedule: a program owns a tile of rows and walks their columns. It keeps for every row the largest
value so far, and sum and number of the values that are equal to it; both start again when the largest rises.
Written as a mean over T, the maximum says by itself what its derivative is where values are equal; after a
rounding to few bits, or a ReLU, they often are. m and |T| are saved, two numbers a row.
Backward schedule: a comparison with m finds T again, so no mask and no index is kept. The owner of a tile of
rows and columns needs nobody else, as |T| is known: one read of x, one write of dx, and all of the GPU works
even if there are few rows.

op: amax
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def amax_kernel(x_ptr, y_ptr, largest_ptr, count_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    largest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    count = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=1))
        equal = inside & (x == larger[:, None])
        total = tl.where(larger > largest, 0.0, total) + tl.sum(tl.where(equal, x, 0.0), axis=1)
        count = tl.where(larger > largest, 0.0, count) + tl.sum(tl.where(equal, 1.0, 0.0), axis=1)
        largest = larger
    tl.store(y_ptr + m, (total / count).to(y_ptr.dtype.element_ty), mask=m < M)
    tl.store(largest_ptr + m, largest, mask=m < M)
    tl.store(count_ptr + m, count, mask=m < M)


def amax_forward(x):
    M, N = x.shape
    if N == 0:
        raise ValueError("an empty row has no maximum")
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    largest, count = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    amax_kernel[(triton.cdiv(M, 8),)](x, y, largest, count, M, N, BLOCK_M=8, BLOCK_N=256)
    return y, largest, count


@autodiff(inputs_require_grad=(0,))
def amax_rows(x):
    """x: (M, N); gives (M)."""
    return amax_forward(x.contiguous())[0]


def reference(x):
    return torch.amax(x, dim=1)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 301, "N": 100003}]
SWEEP_CPU = [{"M": 29, "N": 38}, {"M": 5, "N": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return ((4 * x).round() / 4,)  # so that many rows have equal largest values


# ---- backward ----


@triton.jit
def amax_backward_kernel(
    x_ptr, largest_ptr, count_ptr, dy_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    offs = m[:, None] * N + n[None, :]
    x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + m, mask=m < M, other=0.0)
    count = tl.load(count_ptr + m, mask=m < M, other=1.0)
    share = tl.load(dy_ptr + m, mask=m < M, other=0.0).to(tl.float32) / count
    dx = tl.where(x == largest[:, None], share[:, None], 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class AmaxRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, largest, count = amax_forward(x)
        ctx.save_for_backward(x, largest, count)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, largest, count = ctx.saved_tensors
        (M, N), dx = x.shape, torch.empty_like(x)
        grid = (triton.cdiv(M, 8), triton.cdiv(N, 256))
        amax_backward_kernel[grid](x, largest, count, dy.contiguous(), dx, M, N, BLOCK_M=8, BLOCK_N=256)
        return dx


def amax_rows_autograd(x):
    return AmaxRows.apply(x)
