"""Quantile regression between two sets of samples (distributional reinforcement learning).

Forward    quantiles z_i at levels t_i and target samples y_j of one state, u = y_j - z_i,
           h(u) = u^2 / 2 for |u| <= k, else k (|u| - k / 2);
           l = (1 / (k S)) sum_i sum_{j = 1..S} |t_i - [u < 0]| h(u), one loss a state
Backward   h'(u) = u bounded to [-k, k]:  dz_i = -(dl / (k S)) sum_j |t_i - [u < 0]| h'(u);
           the samples come from a target network and are constants

Forward schedule: the N S pairs of a state never exist in memory. (state, i) is one long axis, cut in tiles
without regard to states, so that few quantiles waste no lanes; a program walks the samples of its tile's
states and leaves a sum for each (state, i), which a second kernel adds for a state.
Backward schedule: the same owner. z_i meets every sample of its state and nothing else, so dz_i is complete
in the registers of the program that walks them, after one reduction. u is a subtraction, made again. The
weight |t - [u < 0]| is a selection of t or 1 - t, by a comparison at which h and h' are 0.

op: quantile_huber
schedule: same_tile_pointwise, row_reduce_correct
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_I": 64, "BLOCK_J": 16}


@triton.jit
def load_quantiles(z_ptr, t_ptr, pair, pairs, N):
    z = tl.load(z_ptr + pair, mask=pair < pairs, other=0.0).to(tl.float32)
    return z, tl.load(t_ptr + pair % N, mask=pair < pairs, other=0.0).to(tl.float32)


@triton.jit
def distances(y_ptr, z, pair, j, pairs, N, S):
    """u of a tile of (state, i) pairs by samples, and which of them count."""
    mask = (pair[:, None] < pairs) & (j[None, :] < S)
    y = tl.load(y_ptr + pair[:, None] // N * S + j[None, :], mask=mask, other=0.0).to(tl.float32)
    return y - z[:, None], mask


@triton.jit
def pair_sums_kernel(
    z_ptr, t_ptr, y_ptr, part_ptr, pairs, N, S, k, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    z, t = load_quantiles(z_ptr, t_ptr, pair, pairs, N)
    total = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.float32)
    for start in range(0, S, BLOCK_J):
        u, mask = distances(y_ptr, z, pair, start + tl.arange(0, BLOCK_J), pairs, N, S)
        size = tl.where(u < 0, -u, u)
        h = tl.where(size <= k, 0.5 * u * u, k * (size - 0.5 * k))
        weight = tl.where(u < 0, 1 - t[:, None], t[:, None])
        total += tl.where(mask, weight * h, 0.0)
    tl.store(part_ptr + pair, tl.sum(total, axis=1) / (k * S), mask=pair < pairs)


@triton.jit
def state_sum_kernel(part_ptr, loss_ptr, N, BLOCK: tl.constexpr):
    state = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + state * N + i, mask=i < N, other=0.0)
    tl.store(loss_ptr + state, tl.sum(total, axis=0))


@autodiff(inputs_require_grad=(0,))
def quantile_huber(z, levels, samples, k=1.0):
    """z: (states, N); levels: (N), from 0 to 1, samples: (states, S), constants; k: positive; gives (states),
    float32."""
    (B, N), S = z.shape, samples.shape[1]
    if levels.shape != (N,) or samples.shape[0] != B or not k > 0:
        raise ValueError("there is a level for each quantile, a set of samples for each state, and k > 0")
    part = torch.empty((B, N), device=z.device, dtype=torch.float32)
    loss = torch.empty(B, device=z.device, dtype=torch.float32)
    grid = (triton.cdiv(B * N, TILE["BLOCK_I"]),)
    pair_sums_kernel[grid](
        z.contiguous(), levels.contiguous(), samples.contiguous(), part, B * N, N, S, k, **TILE
    )
    state_sum_kernel[(B,)](part, loss, N, BLOCK=64)
    return loss


def reference(z, levels, samples, k=1.0):
    u = samples[:, None, :] - z[:, :, None]
    h = torch.where(u.abs() <= k, 0.5 * u * u, k * (u.abs() - 0.5 * k))
    weight = torch.where(u < 0, 1 - levels[:, None], levels[:, None])
    return (weight * h).sum((1, 2)) / (k * samples.shape[1])


SWEEP = [{"B": 2048, "N": 200, "S": 200}, {"B": 4099, "N": 51, "S": 64}]
SWEEP_CPU = [{"B": 13, "N": 9, "S": 20}, {"B": 3, "N": 70, "S": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N = dims["B"], dims["N"]
    levels = ((torch.arange(N, device=device) + 0.5) / N).to(dtype)
    z = 2 * torch.randn(B, N, device=device, dtype=dtype)
    return z, levels, torch.randn(B, dims["S"], device=device, dtype=dtype), 0.7


# ---- backward ----


@triton.jit
def quantile_backward_kernel(
    z_ptr, t_ptr, y_ptr, dloss_ptr, dz_ptr, pairs, N, S, k, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    z, t = load_quantiles(z_ptr, t_ptr, pair, pairs, N)
    total = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.float32)
    for start in range(0, S, BLOCK_J):
        u, mask = distances(y_ptr, z, pair, start + tl.arange(0, BLOCK_J), pairs, N, S)
        slope = tl.where(u > k, k, tl.where(u < -k, -k, u))
        weight = tl.where(u < 0, 1 - t[:, None], t[:, None])
        total += tl.where(mask, weight * slope, 0.0)
    dloss = tl.load(dloss_ptr + pair // N, mask=pair < pairs, other=0.0)
    dz = -dloss * tl.sum(total, axis=1) / (k * S)
    tl.store(dz_ptr + pair, dz.to(dz_ptr.dtype.element_ty), mask=pair < pairs)


class QuantileHuber(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, levels, samples, k):
        z, levels, samples = z.contiguous(), levels.contiguous(), samples.contiguous()
        ctx.save_for_backward(z, levels, samples)
        ctx.k = k
        return quantile_huber(z, levels, samples, k)

    @staticmethod
    def backward(ctx, dloss):
        z, levels, samples = ctx.saved_tensors
        (B, N), S = z.shape, samples.shape[1]
        dz = torch.empty_like(z)
        quantile_backward_kernel[(triton.cdiv(B * N, TILE["BLOCK_I"]),)](
            z, levels, samples, dloss.contiguous(), dz, B * N, N, S, ctx.k, **TILE
        )
        return dz, None, None, None


def quantile_huber_autograd(z, levels, samples, k=1.0):
    return QuantileHuber.apply(z, levels, samples, k)
