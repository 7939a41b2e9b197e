"""Generalised Jensen-Shannon divergence of two distributions given by log-probabilities.

Forward    P = exp(x), Q = exp(y), M = b P + (1 - b) Q, 0 < b < 1;
           l = sum_j b P (x - log M) + (1 - b) Q (y - log M), one loss a row
Backward   through x directly: b P (x - log M) + b P; through log M: -(b P + (1 - b) Q) / M * b P = -b P.
           The two rests cancel, whatever P and Q sum to:
           dx = dl b P (x - log M),  dy = dl (1 - b) Q (y - log M)

Forward schedule: a row's owner walks both rows once and adds elementwise terms. log M is never the log of
exponentials: with h the larger of x + log b and y + log(1 - b), log M = h + log(sum of both exp(. - h)), so
a class that both think unlikely, of probability e^-200, still counts with all its digits.
Backward schedule: what the derivation cancelled needs no kernel: each gradient is the term of the forward
that it belongs to, without a sum over the row. So it is pointwise, (row, column tile) programs, from x, y and
dl alone, no statistic is saved, and each log-probability is read once for both gradients.

op: jsd
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def jsd_terms(x, y, log_b, log_rest):
    """b P (x - log M) and (1 - b) Q (y - log M)."""
    first, second = x + log_b, y + log_rest
    h = tl.maximum(first, second)
    log_m = h + tl.log(tl.exp(first - h) + tl.exp(second - h))
    return tl.exp(first) * (x - log_m), tl.exp(second) * (y - log_m)


@triton.jit
def jsd_kernel(x_ptr, y_ptr, loss_ptr, V, log_b, log_rest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
        first, second = jsd_terms(x, y, log_b, log_rest)
        total += tl.where(cols < V, first + second, 0.0)
    tl.store(loss_ptr + row, tl.sum(total, axis=0))


@autodiff(inputs_require_grad=(0, 1))
def jsd(x, y, beta=0.5):
    """x, y: (M, V), log-probabilities; gives (M) in float32."""
    if x.shape != y.shape:
        raise ValueError("x and y must have one shape")
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}: at 0 and 1 nothing is left of the divergence")
    M, V = x.shape
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = min(2048, triton.next_power_of_2(V))
    jsd_kernel[(M,)](x.contiguous(), y.contiguous(), loss, V, math.log(beta), math.log(1 - beta), BLOCK=BLOCK)
    return loss


def reference(x, y, beta=0.5):
    log_m = torch.logaddexp(x + math.log(beta), y + math.log(1 - beta))
    return (beta * x.exp() * (x - log_m) + (1 - beta) * y.exp() * (y - log_m)).sum(-1)


SWEEP = [{"M": 2048, "V": 32000}, {"M": 251, "V": 128256}]
SWEEP_CPU = [{"M": 20, "V": 101}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, y = (2 * torch.randn(dims["M"], dims["V"], device=device) for _ in range(2))
    return torch.log_softmax(x, -1).to(dtype), torch.log_softmax(y, -1).to(dtype), 0.3


# ---- backward ----


@triton.jit
def jsd_backward_kernel(
    x_ptr, y_ptr, dloss_ptr, dx_ptr, dy_ptr, V, log_b, log_rest,
    NEEDS_DX: tl.constexpr, NEEDS_DY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = row * V + cols, cols < V
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dloss = tl.load(dloss_ptr + row)
    first, second = jsd_terms(x, y, log_b, log_rest)
    if NEEDS_DX:
        tl.store(dx_ptr + offs, (dloss * first).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DY:
        tl.store(dy_ptr + offs, (dloss * second).to(dy_ptr.dtype.element_ty), mask=mask)


class JSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, beta):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        ctx.beta = beta
        return jsd(x, y, beta)

    @staticmethod
    def backward(ctx, dloss):
        x, y = ctx.saved_tensors
        M, V = x.shape
        needs_dx, needs_dy, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_dx else None
        dy = torch.empty_like(y) if needs_dy else None
        BLOCK = min(1024, triton.next_power_of_2(V))
        jsd_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            x, y, dloss.contiguous(), dx, dy, V, math.log(ctx.beta), math.log(1 - ctx.beta),
            NEEDS_DX=needs_dx, NEEDS_DY=needs_dy, BLOCK=BLOCK,
        )  # fmt: skip
        return dx, dy, None


def jsd_autograd(x, y, beta=0.5):
    return JSD.apply(x, y, beta)
