"""Clipped value loss of policy optimisation, over the tokens that count.

Forward    u = v - R,  c = min(max(v, o - a), o + a) - R,  o the value before the update, R the return;
           L = (1 / 2 n) sum over the n tokens with k_i = 1 of max(u^2, c^2)
Backward   where the maximum is u^2 the slope is 2 u. Where it is c^2 the two differ: v is out of its range,
           c does not depend on it, and the slope is 0: of the clipped branch there is no gradient at all:
           dv = (dL / n) k_i u [u^2 >= c^2]

Forward schedule: tokens are flat; a program owns a stretch and leaves two numbers, its part of the sum and of
n. One program adds both.
Backward schedule: the same stretches, pointwise, with n from the device. The comparison is made again, from
the same numbers in the same way, and not saved: a token is read in any case. It is of squares, not of
absolute values, and with >=, so that inside the range, where u and c are equal, a token has its gradient.

op: value_loss
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 4096  # tokens of a program


@triton.jit
def errors(v_ptr, old_ptr, return_ptr, i, n_tokens, reach):
    """u and c of a tile of tokens."""
    v = tl.load(v_ptr + i, mask=i < n_tokens, other=0.0).to(tl.float32)
    old = tl.load(old_ptr + i, mask=i < n_tokens, other=0.0).to(tl.float32)
    R = tl.load(return_ptr + i, mask=i < n_tokens, other=0.0).to(tl.float32)
    moved = v - old
    clipped = tl.where(moved > reach, old + reach, tl.where(moved < -reach, old - reach, v))
    return v - R, clipped - R


@triton.jit
def value_parts_kernel(
    v_ptr, old_ptr, return_ptr, k_ptr, part_ptr, n_tokens, reach, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        i = tl.program_id(0).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        u, c = errors(v_ptr, old_ptr, return_ptr, i, n_tokens, reach)
        counts = tl.load(k_ptr + i, mask=i < n_tokens, other=0) != 0
        total += tl.where(counts, tl.where(u * u >= c * c, u * u, c * c), 0.0)
        count += counts.to(tl.float32)
    tl.store(part_ptr + 2 * tl.program_id(0), tl.sum(total, axis=0))
    tl.store(part_ptr + 2 * tl.program_id(0) + 1, tl.sum(count, axis=0))


@triton.jit
def masked_mean_kernel(part_ptr, loss_ptr, count_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + 2 * i, mask=i < parts, other=0.0)
        count += tl.load(part_ptr + 2 * i + 1, mask=i < parts, other=0.0)
    n = tl.maximum(tl.sum(count, axis=0), 1.0)
    tl.store(count_ptr, n)
    tl.store(loss_ptr, 0.5 * tl.sum(total, axis=0) / n)


def value_forward(values, old_values, returns, mask, reach):
    if not values.shape == old_values.shape == returns.shape == mask.shape:
        raise ValueError("values, old_values, returns and mask must have one shape")
    parts = triton.cdiv(values.numel(), CHUNK)
    part = torch.empty((parts, 2), device=values.device, dtype=torch.float32)
    loss, count = (torch.empty((), device=values.device, dtype=torch.float32) for _ in range(2))
    value_parts_kernel[(parts,)](
        values, old_values, returns, mask, part, values.numel(), reach, CHUNK=CHUNK, BLOCK=1024
    )
    masked_mean_kernel[(1,)](part, loss, count, parts, BLOCK=1024)
    return loss, count


@autodiff(inputs_require_grad=(0,))
def value_loss(values, old_values, returns, mask, reach=0.2):
    """values: (B, T); old_values, returns: (B, T), constants; mask: int8 (B, T), 1 for what counts; gives one
    number in float32."""
    tensors = (tensor.contiguous() for tensor in (values, old_values, returns, mask))
    return value_forward(*tensors, reach)[0]


def reference(values, old_values, returns, mask, reach=0.2):
    moved = values - old_values
    clipped = torch.where(moved > reach, old_values + reach, values)
    clipped = torch.where(moved < -reach, old_values - reach, clipped)
    u, c = values - returns, clipped - returns
    counts = mask != 0
    worse = torch.where(u * u >= c * c, u * u, c * c)
    return 0.5 * torch.where(counts, worse, 0.0).sum() / counts.sum().clamp(min=1)


SWEEP = [{"B": 1024, "T": 8192}, {"B": 509, "T": 1021}]
SWEEP_CPU = [{"B": 7, "T": 45}, {"B": 3, "T": 1500}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"])
    values, returns = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    old_values = values + 0.3 * torch.randn_like(values)
    return values, old_values, returns, (torch.rand(shape, device=device) < 0.7).to(torch.int8)


# ---- backward ----


@triton.jit
def value_backward_kernel(
    v_ptr, old_ptr, return_ptr, k_ptr, count_ptr, dloss_ptr, dv_ptr, n_tokens, reach, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u, c = errors(v_ptr, old_ptr, return_ptr, i, n_tokens, reach)
    counts = tl.load(k_ptr + i, mask=i < n_tokens, other=0) != 0
    g = tl.load(dloss_ptr).to(tl.float32) / tl.load(count_ptr)
    dv = tl.where(counts & (u * u >= c * c), g * u, 0.0)
    tl.store(dv_ptr + i, dv.to(dv_ptr.dtype.element_ty), mask=i < n_tokens)


class ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, old_values, returns, mask, reach):
        saved = tuple(tensor.contiguous() for tensor in (values, old_values, returns, mask))
        loss, count = value_forward(*saved, reach)
        ctx.save_for_backward(*saved, count)
        ctx.reach = reach
        return loss

    @staticmethod
    def backward(ctx, dloss):
        values, old_values, returns, mask, count = ctx.saved_tensors
        dv, n = torch.empty_like(values), values.numel()
        value_backward_kernel[(triton.cdiv(n, 1024),)](
            values, old_values, returns, mask, count, dloss, dv, n, ctx.reach, BLOCK=1024
        )
        return dv, None, None, None, None


def value_loss_autograd(values, old_values, returns, mask, reach=0.2):
    return ValueLoss.apply(values, old_values, returns, mask, reach)
