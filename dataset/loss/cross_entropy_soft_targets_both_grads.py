"""Cross-entropy against soft targets, with gradients for logits and targets.

Forward    l = -sum_j q_j log softmax(z)_j = Q lse - sum_j q_j z_j,  Q = sum_j q_j
Backward   dlse/dz_j = p_j = exp(z_j - lse):  dz_j = dl (Q p_j - q_j),  dq_j = dl (lse - z_j).
           Q is 1 for a distribution, but not for a mixture that dropped some mass, and dq needs it free.

Forward schedule: a row's owner walks z and q side by side, once. It keeps a maximum m, c = sum e^{z - m}, Q
and v = sum q (m - z); a larger maximum m' moves v by (m' - m) Q. Then l = v + Q log c: were Q lse and
sum q z made apart, both would be as large as the logits, and most of their digits would cancel.
Backward schedule: with lse and Q saved every element stands alone, so the grid is (row, column tile): one
read of z and q serves both gradients. A gradient that nobody wants is compiled out, as its store would be a
third of the traffic; without dz the targets are not read again either, for dq is minus the log-probability.

op: cross_entropy_soft
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def soft_loss_kernel(z_ptr, q_ptr, loss_ptr, lse_ptr, mass_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -1e30
    c = 0.0
    Q = 0.0
    v = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        z = tl.load(z_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
        q = tl.load(q_ptr + row * V + cols, mask=mask, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        v += (m_new - m) * Q + tl.sum(q * tl.where(mask, m_new - z, 0.0), axis=0)
        c = c * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        Q += tl.sum(q, axis=0)
        m = m_new
    tl.store(lse_ptr + row, m + tl.log(c))
    tl.store(mass_ptr + row, Q)
    tl.store(loss_ptr + row, v + Q * tl.log(c))


def soft_forward(logits, targets):
    if logits.shape != targets.shape:
        raise ValueError("logits and targets must have one shape")
    M, V = logits.shape
    loss, lse, mass = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    BLOCK = min(2048, triton.next_power_of_2(V))
    soft_loss_kernel[(M,)](logits, targets, loss, lse, mass, V, BLOCK=BLOCK)
    return loss, lse, mass


@autodiff(inputs_require_grad=(0, 1))
def cross_entropy_soft(logits, targets):
    """logits, targets: (M, V); gives (M) in float32."""
    return soft_forward(logits.contiguous(), targets.contiguous())[0]


def reference(logits, targets):
    return -(targets * torch.log_softmax(logits, dim=-1)).sum(-1)


SWEEP = [{"M": 4096, "V": 32000}, {"M": 16384, "V": 1000}]
SWEEP_CPU = [{"M": 21, "V": 77}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    z, t = (2 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype) for _ in range(2))
    return z, torch.softmax(t, dim=-1)


# ---- backward ----


@triton.jit
def soft_backward_kernel(
    z_ptr, q_ptr, lse_ptr, mass_ptr, dloss_ptr, dz_ptr, dq_ptr, V,
    NEEDS_DZ: tl.constexpr, NEEDS_DQ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = row * V + cols, cols < V
    dloss = tl.load(dloss_ptr + row)
    logp = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32) - tl.load(lse_ptr + row)
    if NEEDS_DZ:
        q = tl.load(q_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dz = dloss * (tl.load(mass_ptr + row) * tl.exp(logp) - q)
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DQ:
        tl.store(dq_ptr + offs, (-dloss * logp).to(dq_ptr.dtype.element_ty), mask=mask)


class CrossEntropySoft(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        logits, targets = logits.contiguous(), targets.contiguous()
        loss, lse, mass = soft_forward(logits, targets)
        ctx.save_for_backward(logits, targets, lse, mass)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse, mass = ctx.saved_tensors
        M, V = logits.shape
        needs_dz, needs_dq = ctx.needs_input_grad
        dz = torch.empty_like(logits) if needs_dz else None
        dq = torch.empty_like(targets) if needs_dq else None
        BLOCK = min(2048, triton.next_power_of_2(V))
        soft_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            logits, targets, lse, mass, dloss.contiguous(), dz, dq, V,
            NEEDS_DZ=needs_dz, NEEDS_DQ=needs_dq, BLOCK=BLOCK,
        )  # fmt: skip
        return dz, dq


def cross_entropy_soft_autograd(logits, targets):
    return CrossEntropySoft.apply(logits, targets)
