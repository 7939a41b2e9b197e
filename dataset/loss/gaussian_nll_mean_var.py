"""Negative log-likelihood of a normal distribution by mean and log-variance, as a sum.

Forward    r = (x - m) e^(-v / 2) with v = log(variance), bounded below by v_min;  L = sum (v + r^2) / 2
Backward   dx = dL r e^(-v / 2),  dm = -dx,  dv = dL (1 - r^2) / 2, and 0 where v is below its bound

Forward schedule: programs own stretches of the flat tensors and leave parts; a second kernel adds them.
Backward schedule: one pass over three inputs with three stores. The logarithm of the variance is the input,
so that no division and no logarithm is needed, in neither pass, and no variance is ever 0: e^(-v / 2) is made
once an element and serves r and dx. dm is dx with another sign, stored beside it: gradients do not share
memory. The bound is a selection on v, in the backward by the same comparison, so that they agree at the
bound.

op: gaussian_nll
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 1
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 8192  # elements of a program


@triton.jit
def nll_parts_kernel(
    m_ptr, v_ptr, x_ptr, part_ptr, n, v_min, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offs = tl.program_id(0).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        m = tl.load(m_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        v = tl.where(v > v_min, v, v_min)
        r = (x - m) * tl.exp(-0.5 * v)
        total += tl.where(offs < n, 0.5 * (v + r * r), 0.0)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def add_kernel(part_ptr, loss_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))


@autodiff(inputs_require_grad=(0, 1, 2))
def gaussian_nll(mean, log_variance, x, lowest=-7.1):
    """mean, log_variance, x: any shape; lowest: bound of log_variance; gives one number in float32."""
    if not mean.shape == log_variance.shape == x.shape:
        raise ValueError("mean, log_variance and x must have one shape")
    mean, log_variance, x = mean.contiguous(), log_variance.contiguous(), x.contiguous()
    n, parts = x.numel(), triton.cdiv(x.numel(), CHUNK)
    part = torch.empty(parts, device=x.device, dtype=torch.float32)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    nll_parts_kernel[(parts,)](mean, log_variance, x, part, n, lowest, CHUNK=CHUNK, BLOCK=1024)
    add_kernel[(1,)](part, loss, parts, BLOCK=1024)
    return loss


def reference(mean, log_variance, x, lowest=-7.1):
    v = torch.where(log_variance > lowest, log_variance, lowest)
    return 0.5 * (v + (x - mean) ** 2 * torch.exp(-v)).sum()


SWEEP = [{"N": 50000000}, {"N": 1234577}]
SWEEP_CPU = [{"N": 777}, {"N": 9001}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """The bound is no number of a short dtype, so that no log-variance is equal to it."""
    mean, v, x = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(3))
    return mean, v - 1, x, -2.0071


# ---- backward ----


@triton.jit
def nll_backward_kernel(
    m_ptr, v_ptr, x_ptr, dloss_ptr, dm_ptr, dv_ptr, dx_ptr, n, v_min, BLOCK: tl.constexpr
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    m = tl.load(m_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(v_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dloss = tl.load(dloss_ptr).to(tl.float32)
    narrow = tl.exp(-0.5 * tl.where(raw > v_min, raw, v_min))
    r = (x - m) * narrow
    dx = dloss * r * narrow
    dv = tl.where(raw > v_min, dloss * 0.5 * (1 - r * r), 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dm_ptr + offs, (-dx).to(dm_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=mask)


class GaussianNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, log_variance, x, lowest):
        mean, log_variance, x = mean.contiguous(), log_variance.contiguous(), x.contiguous()
        ctx.save_for_backward(mean, log_variance, x)
        ctx.lowest = lowest
        return gaussian_nll(mean, log_variance, x, lowest)

    @staticmethod
    def backward(ctx, dloss):
        saved = ctx.saved_tensors
        grads = tuple(torch.empty_like(tensor) for tensor in saved)
        n = saved[0].numel()
        nll_backward_kernel[(triton.cdiv(n, 1024),)](*saved, dloss, *grads, n, ctx.lowest, BLOCK=1024)
        needs = zip(grads, ctx.needs_input_grad[:3], strict=True)
        return *(grad if needed else None for grad, needed in needs), None


def gaussian_nll_autograd(mean, log_variance, x, lowest=-7.1):
    return GaussianNLL.apply(mean, log_variance, x, lowest)
