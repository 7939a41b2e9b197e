"""Focal loss over a softmax: rows that are right already count less.

Forward    p = softmax(z),  t the target,  q = 1 - p_t,  l = q^k (-log p_t), one loss a row
Backward   with dp_t/dz_j = p_t ([j = t] - p_j) and dq = -dp_t,
           dl/dp_t = -k q^(k-1) (-log p_t) - q^k / p_t, so dz_j = dl F (p_j - [j = t]) with
           F = -p_t dl/dp_t = q^k (k p_t (-log p_t) / q + 1)

Forward schedule: a row's owner has it in one tile. q is the sum over the other classes, not 1 - p_t: the loss
is about rows where p_t is nearly 1, and there the difference has no digits left while the sum has all of
them. So has -log p_t = log(1 + o), o = (sum of the others) / e_t, by a series where o is small.
Backward schedule: all powers and logarithms are of the row, not of the element. The forward's owner has them
at hand and saves F, q and lse; the backward is (row, column tile) programs with one exp an element, as cheap
as plain cross-entropy. At the target p_j - 1 is -q, which keeps its digits again.

op: softmax_focal
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softmax_focal_kernel(z_ptr, target_ptr, loss_ptr, stats_ptr, M, C, gamma, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    z = tl.load(z_ptr + row * C + cols, mask=cols < C, other=-float("inf")).to(tl.float32)
    m = tl.max(z, axis=0)
    e = tl.exp(z - m)
    others = tl.sum(tl.where(cols == target, 0.0, e), axis=0)
    right = tl.exp(tl.load(z_ptr + row * C + target).to(tl.float32) - m)
    q = others / (others + right)
    o = others / right
    nll = tl.where(o < 0.01, o * (1 - o * (1.0 / 2 - o * (1.0 / 3 - o / 4))), tl.log(1 + o))
    some = tl.where(q > 0, q, 1.0)  # q is 0 where all others underflow
    power = tl.where(q > 0, tl.exp(gamma * tl.log(some)), 0.0)
    tl.store(loss_ptr + row, power * nll)
    F = power * (gamma * (1 - q) * nll / some + 1)
    tl.store(stats_ptr + row, m + tl.log(others + right))
    tl.store(stats_ptr + M + row, q)
    tl.store(stats_ptr + 2 * M + row, F)


def softmax_focal_forward(logits, target, gamma):
    M, C = logits.shape
    if not 2 <= C <= 16384:
        raise ValueError(f"{C} classes: a row has at least 2, and fits one tile")
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    stats = torch.empty((3, M), device=logits.device, dtype=torch.float32)
    softmax_focal_kernel[(M,)](logits, target, loss, stats, M, C, gamma, BLOCK=triton.next_power_of_2(C))
    return loss, stats


@autodiff(inputs_require_grad=(0,))
def softmax_focal_loss(logits, target, gamma=2.0):
    """logits: (M, C); target: int64 (M); gives (M) in float32."""
    return softmax_focal_forward(logits.contiguous(), target.contiguous(), gamma)[0]


def reference(logits, target, gamma=2.0):
    nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    return (-torch.expm1(-nll)) ** gamma * nll


SWEEP = [{"M": 65536, "C": 1203}, {"M": 16381, "C": 8142}]
SWEEP_CPU = [{"M": 28, "C": 45}, {"M": 5, "C": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, C = dims["M"], dims["C"]
    return 3 * torch.randn(M, C, device=device, dtype=dtype), torch.randint(0, C, (M,), device=device)


# ---- backward ----


@triton.jit
def softmax_focal_backward_kernel(
    z_ptr, target_ptr, stats_ptr, dloss_ptr, dz_ptr, M, C, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * C + cols, mask=cols < C, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(stats_ptr + row))
    factor = tl.load(dloss_ptr + row) * tl.load(stats_ptr + 2 * M + row)
    dz = factor * tl.where(cols == tl.load(target_ptr + row), -tl.load(stats_ptr + M + row), p)
    tl.store(dz_ptr + row * C + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < C)


class SoftmaxFocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, gamma):
        logits, target = logits.contiguous(), target.contiguous()
        loss, stats = softmax_focal_forward(logits, target, gamma)
        ctx.save_for_backward(logits, target, stats)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, target, stats = ctx.saved_tensors
        M, C = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(1024, triton.next_power_of_2(C))
        softmax_focal_backward_kernel[(M, triton.cdiv(C, BLOCK))](
            logits, target, stats, dloss.contiguous(), dz, M, C, BLOCK=BLOCK
        )
        return dz, None, None


def softmax_focal_loss_autograd(logits, target, gamma=2.0):
    return SoftmaxFocalLoss.apply(logits, target, gamma)
