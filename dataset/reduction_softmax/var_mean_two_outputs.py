"""Variance and mean of every row, two outputs of one reduction.

Forward    m = (1 / N) sum x,   v = (1 / (N - 1)) sum (x - m)^2
Backward   dm/dx_i = 1 / N,   dv/dx_i = 2 (x_i - m) / (N - 1)   (m inside v adds nothing, as sum (x - m) = 0):
           dx_i = dm / N + 2 (x_i - m) dv / (N - 1)

Forward schedule: a program owns a tile of rows and walks the columns once; a tile's mean and squares are
merged into the running ones (Chan's rule), so rows of any length need one read, and nothing cancels.
Backward schedule: with m saved no sum is left. dx is linear in x with two constants a row, so owners of tiles
of rows and columns read x and write dx, once each, wherever the tile lies: no row owner, no order. An output
that nobody uses has an upstream of zeros and its term vanishes; the two are not worth a kernel each.

op: var_mean
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_M": 8, "BLOCK_N": 256}


@triton.jit
def var_mean_kernel(x_ptr, var_ptr, mean_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        count = tl.minimum(BLOCK_N, N - start).to(tl.float32)
        tile_mean = tl.sum(x, axis=1) / count
        centred = tl.where(n[None, :] < N, x - tile_mean[:, None], 0.0)
        step, share = tile_mean - mean, count / (start + count)
        squares += tl.sum(centred * centred, axis=1) + step * step * (start * share)
        mean += step * share
    tl.store(var_ptr + m, squares / (N - 1), mask=m < M)
    tl.store(mean_ptr + m, mean, mask=m < M)


@autodiff(inputs_require_grad=(0,))
def var_mean(x):
    """x: (M, N), N at least 2; gives the unbiased variance and the mean, (M) each, in float32."""
    x, (M, N) = x.contiguous(), x.shape
    if N < 2:
        raise ValueError(f"{N} numbers have no unbiased variance")
    var, mean = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    var_mean_kernel[(triton.cdiv(M, 8),)](x, var, mean, M, N, **BLOCKS)
    return var, mean


def reference(x):
    return torch.var_mean(x, dim=1)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 301, "N": 100003}]
SWEEP_CPU = [{"M": 27, "N": 76}, {"M": 5, "N": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (0.5 + 2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def var_mean_backward_kernel(
    x_ptr, mean_ptr, dvar_ptr, dmean_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + m, mask=m < M, other=0.0)
    constant = tl.load(dmean_ptr + m, mask=m < M, other=0.0) / N
    slope = 2 * tl.load(dvar_ptr + m, mask=m < M, other=0.0) / (N - 1)
    dx = constant[:, None] + (x - mean[:, None]) * slope[:, None]
    tl.store(dx_ptr + m[:, None] * N + n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class VarMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        var, mean = var_mean(x)
        ctx.save_for_backward(x, mean)
        return var, mean

    @staticmethod
    def backward(ctx, dvar, dmean):
        x, mean = ctx.saved_tensors
        (M, N), dx = x.shape, torch.empty_like(x)
        grid = (triton.cdiv(M, 8), triton.cdiv(N, 256))
        var_mean_backward_kernel[grid](x, mean, dvar.contiguous(), dmean.contiguous(), dx, M, N, **BLOCKS)
        return dx


def var_mean_autograd(x):
    return VarMean.apply(x)
