"""Penalty on the largest logit of each position, which keeps a language model's logits from drifting.

Forward    k_i the first place of the largest logit of row i,  L = (w / 2 M) sum_i z_{i, k_i}^2
Backward   dz_ij = (w dL / M) z_{i, k_i} for j = k_i, else 0

Forward schedule: a row's owner walks it with a running maximum and its place; the square of each row is a
part, and one program adds the parts.
Backward schedule: one number of a row is not 0. The forward has saved its place and value, two numbers a row,
so the backward never touches the logits: (row, column tile) programs store zeros, and the value where the
column is the place. It is half the traffic of a pointwise backward, and one kernel where clearing and
scattering would be two.

op: l2warp
schedule: index_or_seed_replay, partials_then_reduce
difficulty: 1
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def row_max_kernel(z_ptr, place_ptr, value_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = -float("inf")
    place = 0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        value, index = tl.max(z, axis=0, return_indices=True)
        place = tl.where(value > best, start + index, place)
        best = tl.maximum(best, value)
    tl.store(place_ptr + row, place)
    tl.store(value_ptr + row, tl.load(z_ptr + row * V + place).to(tl.float32))


@triton.jit
def penalty_kernel(value_ptr, loss_ptr, M, weight, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + rows, mask=rows < M, other=0.0)
        total += value * value
    tl.store(loss_ptr, 0.5 * weight / M * tl.sum(total, axis=0))


def penalty_forward(logits, weight):
    M, V = logits.shape
    place = torch.empty(M, device=logits.device, dtype=torch.int32)
    value = torch.empty(M, device=logits.device, dtype=torch.float32)
    loss = torch.empty((), device=logits.device, dtype=torch.float32)
    row_max_kernel[(M,)](logits, place, value, V, BLOCK=min(2048, triton.next_power_of_2(V)))
    penalty_kernel[(1,)](value, loss, M, weight, BLOCK=1024)
    return loss, place, value


@autodiff(inputs_require_grad=(0,))
def l2warp(logits, weight=1e-4):
    """logits: (M, V); gives one number in float32."""
    return penalty_forward(logits.contiguous(), weight)[0]


def reference(logits, weight=1e-4):
    return 0.5 * weight * logits.max(dim=1).values.pow(2).mean()


SWEEP = [{"M": 2048, "V": 65536}, {"M": 509, "V": 50257}]
SWEEP_CPU = [{"M": 21, "V": 120}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return 3 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype), 0.5


# ---- backward ----


@triton.jit
def penalty_backward_kernel(
    place_ptr, value_ptr, dloss_ptr, dz_ptr, M, V, weight, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = weight / M * tl.load(dloss_ptr).to(tl.float32) * tl.load(value_ptr + row)
    dz = tl.where(cols == tl.load(place_ptr + row), value, 0.0)
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


class L2Warp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, weight):
        logits = logits.contiguous()
        loss, place, value = penalty_forward(logits, weight)
        ctx.save_for_backward(place, value)
        ctx.weight, ctx.shape, ctx.dtype = weight, logits.shape, logits.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):
        place, value = ctx.saved_tensors
        M, V = ctx.shape
        dz = torch.empty((M, V), device=value.device, dtype=ctx.dtype)
        penalty_backward_kernel[(M, triton.cdiv(V, 2048))](
            place, value, dloss, dz, M, V, ctx.weight, BLOCK=2048
        )
        return dz, None


def l2warp_autograd(logits, weight=1e-4):
    return L2Warp.apply(logits, weight)
