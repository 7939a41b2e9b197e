"""KL divergence from log-probabilities on both sides, both with gradients, as the mean over the batch.

Forward    L = (1 / M) sum over all elements of e^t (t - x),  x the input's and t the target's log-probability
Backward   with g = dL / M:  dx = -g e^t,  dt = g e^t (t - x + 1)

Forward schedule: nothing in the sum knows of rows, so the tensor is flat: programs own equal stretches of it,
a few tiles each, and leave a part; one more program adds the parts. Short and long rows alike fill all lanes.
Backward schedule: the same stretches, pointwise, with the upstream, one number, read from the device by every
program. x enters dt alone: if only the input wants a gradient, as in distillation from a frozen teacher, the
kernel reads t, writes dx, and x is neither loaded nor, by the forward, saved.

op: kl_div
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 8192  # elements of a program


@triton.jit
def kl_parts_kernel(x_ptr, t_ptr, part_ptr, n, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offs = tl.program_id(0).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        total += tl.exp(t) * (t - x)  # 0 where x and t are 0
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def batch_mean_kernel(part_ptr, loss_ptr, parts, M, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / M)


@autodiff(inputs_require_grad=(0, 1))
def kl_div(x, t):
    """x, t: (M, V), log-probabilities; gives one number in float32."""
    if x.shape != t.shape:
        raise ValueError("x and t must have one shape")
    parts = triton.cdiv(x.numel(), CHUNK)
    part = torch.empty(parts, device=x.device, dtype=torch.float32)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    kl_parts_kernel[(parts,)](x.contiguous(), t.contiguous(), part, x.numel(), CHUNK=CHUNK, BLOCK=1024)
    batch_mean_kernel[(1,)](part, loss, parts, x.shape[0], BLOCK=1024)
    return loss


def reference(x, t):
    return torch.nn.functional.kl_div(x, t, reduction="batchmean", log_target=True)


SWEEP = [{"M": 2048, "V": 32000}, {"M": 100003, "V": 101}]
SWEEP_CPU = [{"M": 23, "V": 120}, {"M": 90, "V": 101}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, t = (2 * torch.randn(dims["M"], dims["V"], device=device) for _ in range(2))
    return torch.log_softmax(x, dim=-1).to(dtype), torch.log_softmax(t, dim=-1).to(dtype)


# ---- backward ----


@triton.jit
def kl_backward_kernel(
    x_ptr, t_ptr, dloss_ptr, dx_ptr, dt_ptr, n, M,
    NEEDS_DX: tl.constexpr, NEEDS_DT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    t = tl.load(t_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(dloss_ptr).to(tl.float32) / M * tl.exp(t)
    if NEEDS_DX:
        tl.store(dx_ptr + offs, (-weight).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DT:
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dt_ptr + offs, (weight * (t - x + 1)).to(dt_ptr.dtype.element_ty), mask=mask)


class KLDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        x, t = x.contiguous(), t.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, t)
        return kl_div(x, t)

    @staticmethod
    def backward(ctx, dloss):
        x, t = ctx.saved_tensors
        needs_dx, needs_dt = ctx.needs_input_grad
        dx = torch.empty_like(t) if needs_dx else None
        dt = torch.empty_like(t) if needs_dt else None
        kl_backward_kernel[(triton.cdiv(t.numel(), 1024),)](
            x, t, dloss, dx, dt, t.numel(), t.shape[0], NEEDS_DX=needs_dx, NEEDS_DT=needs_dt, BLOCK=1024
        )
        return dx, dt


def kl_div_autograd(x, t):
    return KLDiv.apply(x, t)
