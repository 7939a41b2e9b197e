"""Entropy of a softmax over logits, one number a row.

Forward    H = -sum_j p_j log p_j = lse - sum_j p_j z_j,  p = softmax(z),  lse = log sum_j exp(z_j)
Backward   dH/dz_j = p_j - p_j z_j - p_j (1 - sum_k p_k z_k) = -p_j (z_j - lse + H),
           so dz_j = -dH p_j (log p_j + H): what is more likely than the entropy says is pushed down

Forward schedule: a row's owner walks it once with three numbers carried on: the maximum m, s = sum e^{z - m}
and u = sum e^{z - m} (z - m). A new maximum rescales s, and moves u by (m - m') s before it is rescaled too.
Then lse = m + log s and H = log s - u / s, in which nothing large cancels. Both are saved.
Backward schedule: with lse and H saved no element depends on another: a grid of (row, column tile) programs
reads the logits once and writes the gradient once, without a loop or a reduction.

op: softmax_entropy
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def entropy_kernel(z_ptr, h_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    u = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        z = tl.load(z_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        d = tl.where(mask, z - m_new, 0.0)
        e = tl.where(mask, tl.exp(d), 0.0)
        old = tl.exp(m - m_new)
        moved = tl.where(s > 0, (m - m_new) * s, 0.0)  # at first m is no number to count with
        u = (u + moved) * old + tl.sum(e * d, axis=0)
        s = s * old + tl.sum(e, axis=0)
        m = m_new
    tl.store(lse_ptr + row, m + tl.log(s))
    tl.store(h_ptr + row, tl.log(s) - u / s)


def entropy_forward(logits):
    M, V = logits.shape
    h = torch.empty(M, device=logits.device, dtype=torch.float32)
    lse = torch.empty_like(h)
    entropy_kernel[(M,)](logits, h, lse, V, BLOCK=min(2048, triton.next_power_of_2(V)))
    return h, lse


@autodiff(inputs_require_grad=(0,))
def softmax_entropy(logits):
    """logits: (M, V); gives (M) in float32, in nats."""
    return entropy_forward(logits.contiguous())[0]


def reference(logits):
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).sum(-1)


SWEEP = [{"M": 4096, "V": 32000}, {"M": 1021, "V": 50257}]
SWEEP_CPU = [{"M": 19, "V": 300}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def entropy_backward_kernel(z_ptr, h_ptr, lse_ptr, dh_ptr, dz_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < V
    z = tl.load(z_ptr + row * V + cols, mask=mask, other=0.0).to(tl.float32)
    logp = z - tl.load(lse_ptr + row)
    dh = tl.load(dh_ptr + row).to(tl.float32)
    dz = -dh * tl.exp(logp) * (logp + tl.load(h_ptr + row))
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=mask)


class SoftmaxEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        logits = logits.contiguous()
        h, lse = entropy_forward(logits)
        ctx.save_for_backward(logits, h, lse)
        return h

    @staticmethod
    def backward(ctx, dh):
        logits, h, lse = ctx.saved_tensors
        M, V = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        entropy_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            logits, h, lse, dh.contiguous(), dz, V, BLOCK=BLOCK
        )
        return dz


def softmax_entropy_autograd(logits):
    return SoftmaxEntropy.apply(logits)
