"""Mean Huber loss of two tensors.

Forward    l = (1 / n) sum_i h(x_i - y_i),  h(e) = e^2 / 2 if |e| <= delta, else delta (|e| - delta / 2)
Backward   h'(e) = clamp(e, -delta, delta), so dx = clamp(x - y, -delta, delta) dl / n and dy = -dx

Forward schedule: flat tiles store partial sums; one program of a second kernel adds them: two levels, no
atomics.
Backward schedule: flat tiles again, one pass, no reduction. The upstream is a single number on the device,
which every program reads, so nothing waits for the host.

op: huber_loss
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def huber_partials_kernel(x_ptr, y_ptr, part_ptr, n, delta, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    e = tl.abs(x - tl.load(y_ptr + offs, mask=offs < n, other=0.0).to(tl.float32))
    h = tl.where(e <= delta, 0.5 * e * e, delta * (e - 0.5 * delta))
    tl.store(part_ptr + tl.program_id(0), tl.sum(h, axis=0))


@triton.jit
def mean_kernel(part_ptr, loss_ptr, parts, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + offs, mask=offs < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / n)


@autodiff(inputs_require_grad=(0, 1))
def huber_loss(x, y, delta=1.0):
    if x.shape != y.shape:
        raise ValueError("x and y must have one shape")
    n = x.numel()
    parts = triton.cdiv(n, 1024)
    part = torch.empty(parts, device=x.device, dtype=torch.float32)
    loss = torch.empty((), device=x.device, dtype=x.dtype)
    huber_partials_kernel[(parts,)](x.contiguous(), y.contiguous(), part, n, delta, BLOCK=1024)
    mean_kernel[(1,)](part, loss, parts, n, BLOCK=1024)
    return loss


def reference(x, y, delta=1.0):
    return torch.nn.functional.huber_loss(x, y, delta=delta)


SWEEP = [{"N": 1 << 26}, {"N": 32 * 3 * 512 * 512}, {"N": 50000017}]
SWEEP_CPU = [{"N": 5003}, {"N": 1024}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def huber_backward_kernel(x_ptr, y_ptr, dloss_ptr, dx_ptr, dy_ptr, n, delta, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    e = x - tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = tl.minimum(tl.maximum(e, -delta), delta) * (tl.load(dloss_ptr).to(tl.float32) / n)
    tl.store(dx_ptr + offs, dx, mask=mask)
    tl.store(dy_ptr + offs, -dx, mask=mask)


class HuberLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, delta):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        ctx.delta = delta
        return huber_loss(x, y, delta)

    @staticmethod
    def backward(ctx, dloss):
        x, y = ctx.saved_tensors
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        n = x.numel()
        huber_backward_kernel[(triton.cdiv(n, 1024),)](x, y, dloss, dx, dy, n, ctx.delta, BLOCK=1024)
        return dx if ctx.needs_input_grad[0] else None, dy if ctx.needs_input_grad[1] else None, None


def huber_loss_autograd(x, y, delta=1.0):
    return HuberLoss.apply(x, y, delta)
