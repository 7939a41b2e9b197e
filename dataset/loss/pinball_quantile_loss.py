"""Quantile regression: several quantiles of one target, each with its pinball loss.

Forward    e_iq = y_i - z_iq,  h = max(q e, (q - 1) e) for the level q,  l_i = sum over the levels of h
Backward   h' = q for e > 0 and q - 1 for e <= 0:  dz_iq = -dl_i h',  dy_i = dl_i sum over the levels of h'

Forward schedule: levels are few, so a program owns a tile of rows with all of their levels.
Backward schedule: the same tile, which has what both gradients want: dz pointwise, and dy as its sum along
the row, for no pass of its own. h' is made of the comparison and not of h, whose value is not needed again,
so neither pass keeps anything but its inputs. Levels are read by every program, a few numbers in cache.

op: quantile_loss
schedule: same_tile_pointwise, row_reduce_correct
difficulty: 1
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(M, Q):
    """The grid and the tile of rows by levels."""
    BLOCK_Q = triton.next_power_of_2(Q)
    BLOCK_M = max(1, 1024 // BLOCK_Q)
    return (triton.cdiv(M, BLOCK_M),), {"BLOCK_M": BLOCK_M, "BLOCK_Q": BLOCK_Q}


@triton.jit
def quantile_kernel(
    z_ptr, y_ptr, level_ptr, loss_ptr, M, Q, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = tl.arange(0, BLOCK_Q)
    mask = (rows[:, None] < M) & (q[None, :] < Q)
    level = tl.load(level_ptr + q, mask=q < Q, other=0.0).to(tl.float32)[None, :]
    y = tl.load(y_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    e = y[:, None] - tl.load(z_ptr + rows[:, None] * Q + q[None, :], mask=mask, other=0.0).to(tl.float32)
    h = tl.where(mask, e * tl.where(e > 0, level, level - 1), 0.0)
    tl.store(loss_ptr + rows, tl.sum(h, axis=1), mask=rows < M)


@autodiff(inputs_require_grad=(0, 1))
def quantile_loss(z, y, levels):
    """z: (M, Q), predicted quantiles; y: (M); levels: (Q), from 0 to 1, constants; gives (M) in float32."""
    M, Q = z.shape
    if y.shape != (M,) or levels.shape != (Q,) or Q > 1024:
        raise ValueError("z is (M, Q), y (M) and levels (Q), with Q of up to 1024")
    loss = torch.empty(M, device=z.device, dtype=torch.float32)
    grid, blocks = tiling(M, Q)
    quantile_kernel[grid](z.contiguous(), y.contiguous(), levels.contiguous(), loss, M, Q, **blocks)
    return loss


def reference(z, y, levels):
    e = y[:, None] - z
    return (e * torch.where(e > 0, levels, levels - 1)).sum(1)


SWEEP = [{"M": 4000000, "Q": 9}, {"M": 300007, "Q": 99}]
SWEEP_CPU = [{"M": 37, "Q": 9}, {"M": 300, "Q": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, Q = dims["M"], dims["Q"]
    z = torch.randn(M, Q, device=device, dtype=dtype)
    levels = torch.arange(1, Q + 1, device=device, dtype=dtype) / (Q + 1)
    return z, torch.randn(M, device=device, dtype=dtype), levels


# ---- backward ----


@triton.jit
def quantile_backward_kernel(
    z_ptr, y_ptr, level_ptr, dloss_ptr, dz_ptr, dy_ptr, M, Q, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = tl.arange(0, BLOCK_Q)
    mask = (rows[:, None] < M) & (q[None, :] < Q)
    offs = rows[:, None] * Q + q[None, :]
    level = tl.load(level_ptr + q, mask=q < Q, other=0.0).to(tl.float32)[None, :]
    y = tl.load(y_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    slope = tl.where(mask, tl.where(y[:, None] - z > 0, level, level - 1), 0.0)
    tl.store(dz_ptr + offs, (-dloss[:, None] * slope).to(dz_ptr.dtype.element_ty), mask=mask)
    tl.store(dy_ptr + rows, (dloss * tl.sum(slope, axis=1)).to(dy_ptr.dtype.element_ty), mask=rows < M)


class QuantileLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y, levels):
        z, y, levels = z.contiguous(), y.contiguous(), levels.contiguous()
        ctx.save_for_backward(z, y, levels)
        return quantile_loss(z, y, levels)

    @staticmethod
    def backward(ctx, dloss):
        z, y, levels = ctx.saved_tensors
        dz, dy, (M, Q) = torch.empty_like(z), torch.empty_like(y), z.shape
        grid, blocks = tiling(M, Q)
        quantile_backward_kernel[grid](z, y, levels, dloss.contiguous(), dz, dy, M, Q, **blocks)
        return dz if ctx.needs_input_grad[0] else None, dy if ctx.needs_input_grad[1] else None, None


def quantile_loss_autograd(z, y, levels):
    return QuantileLoss.apply(z, y, levels)
