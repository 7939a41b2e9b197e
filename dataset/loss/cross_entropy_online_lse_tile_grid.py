"""Cross-entropy of logits against class indices, one loss a row.

Forward    l = lse(z) - z_t,  lse(z) = log sum_j exp(z_j)
Backward   dl/dz_j = exp(z_j - lse) - 1[j = t], so dz_j = (exp(z_j - lse) - 1[j = t]) * dl

Forward schedule: a row's owner walks the vocabulary once with an online maximum and sum, and saves lse.
Backward schedule: given lse no element depends on another, so a 2D grid of (row, vocabulary tile) programs
rebuilds the softmax tile by tile without loops or reductions. One read and one write of the logits, the
least possible, and a batch of few rows with a large vocabulary still fills the device.

op: cross_entropy
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def cross_entropy_kernel(z_ptr, target_ptr, loss_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    lse = m + tl.log(s)
    z_t = tl.load(z_ptr + row * V + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - z_t)


def cross_entropy_forward(logits, target):
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    cross_entropy_kernel[(M,)](logits, target, loss, lse, V, BLOCK=min(1024, triton.next_power_of_2(V)))
    return loss, lse


@autodiff(inputs_require_grad=(0,))
def cross_entropy(logits, target):
    return cross_entropy_forward(logits.contiguous(), target.contiguous())[0]


def reference(logits, target):
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


SWEEP = [{"M": 4096, "V": 32000}, {"M": 1000, "V": 128256}, {"M": 1021, "V": 50257}]
SWEEP_CPU = [{"M": 19, "V": 300}, {"M": 3, "V": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, V = dims["M"], dims["V"]
    return 2 * torch.randn(M, V, device=device, dtype=dtype), torch.randint(0, V, (M,), device=device)


# ---- backward ----


@triton.jit
def cross_entropy_backward_kernel(z_ptr, target_ptr, lse_ptr, dloss_ptr, dz_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < V
    z = tl.load(z_ptr + row * V + cols, mask=mask, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(lse_ptr + row))
    onehot = tl.where(cols == tl.load(target_ptr + row), 1.0, 0.0)
    tl.store(dz_ptr + row * V + cols, (p - onehot) * tl.load(dloss_ptr + row), mask=mask)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        logits, target = logits.contiguous(), target.contiguous()
        loss, lse = cross_entropy_forward(logits, target)
        ctx.save_for_backward(logits, target, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        dloss = dloss.contiguous()
        M, V = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(1024, triton.next_power_of_2(V))
        cross_entropy_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            logits, target, lse, dloss, dz, V, BLOCK=BLOCK
        )
        return dz, None


def cross_entropy_autograd(logits, target):
    return CrossEntropy.apply(logits, target)
