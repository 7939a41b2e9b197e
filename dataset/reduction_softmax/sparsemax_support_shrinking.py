"""Sparsemax: the point of the probability simplex that is nearest to a row of scores.

Forward    y_i = x_i - t where x_i > t and 0 elsewhere, with t such that sum y = 1:
           t = (sum over S of x - 1) / |S|,   S = {i: x_i > t} the support
Backward   S is piecewise constant; there dt/dx_j = 1 / |S|, so
           dx_i = dy_i - (1 / |S|) sum over S of dy for i in S, and 0 elsewhere

Forward schedule: a program owns a row in one tile and needs no sort. Start with all lanes as the support,
compute t from it, keep the lanes above t, and repeat until none leaves: t only rises, and a lane that has
left lies below every later t. A handful of rounds in registers usually do. The row is shifted by its maximum
first, so that the largest lane is 0 > t in every round and the support is never empty.
Backward schedule: the same owner. S can be read off y > 0, so y is all that is kept, and it is kept by
whoever multiplies with it: the threshold, the order and x are not needed. Softmax's <dy, y> becomes a mean of
dy over the support; two reads, one write.

op: sparsemax
schedule: row_reduce_correct, index_or_seed_replay
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def sparsemax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x = tl.where(mask, x - tl.max(x, axis=0), -float("inf"))
    support = mask
    size = tl.sum(tl.where(support, 1.0, 0.0), axis=0)
    before = size + 1
    t = -float("inf") + tl.zeros_like(size)
    while size < before:
        t = (tl.sum(tl.where(support, x, 0.0), axis=0) - 1) / size
        before = size
        support = x > t
        size = tl.sum(tl.where(support, 1.0, 0.0), axis=0)
    y = tl.where(support, x - t, 0.0)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def sparsemax(x):
    """x: (..., N); gives rows that are not negative and of sum 1."""
    x, N = x.contiguous(), x.shape[-1]
    if not 1 <= N <= 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    sparsemax_kernel[(x.numel() // N,)](x, y, N, BLOCK=triton.next_power_of_2(N))
    return y


def reference(x):
    ranked = x.sort(dim=-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device)
    sums = ranked.cumsum(-1) - 1
    size = (ranked * k > sums).sum(-1, keepdim=True)
    t = sums.gather(-1, size - 1) / size
    return torch.relu(x - t)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1000}]
SWEEP_CPU = [{"M": 22, "N": 33}, {"M": 60, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def sparsemax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    y = tl.load(y_ptr + row * N + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    support = y > 0
    dy = tl.where(support, dy, 0.0)
    size = tl.sum(tl.where(support, 1.0, 0.0), axis=0)
    dx = tl.where(support, dy - tl.sum(dy, axis=0) / size, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = sparsemax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        N, dx = y.shape[-1], torch.empty_like(y)
        grid = (y.numel() // N,)
        sparsemax_backward_kernel[grid](y, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))
        return dx


def sparsemax_autograd(x):
    return Sparsemax.apply(x)
