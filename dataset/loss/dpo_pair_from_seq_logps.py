"""Direct preference optimisation from logits: one loss for each pair of a chosen and a rejected answer.

Forward    lp_s = sum over the labelled tokens t of sequence s of (z_{s,t,a} - lse_{s,t}),  a the label;
           u_k = beta ((lp_c - ref_c) - (lp_r - ref_r)),  l_k = log(1 + exp(-u_k));  c = k, r = k + pairs
Backward   dl/du = -sigmoid(-u), so with g_k = dl_k beta sigmoid(-u_k) the sequences get dlp_c = -g_k,
           dlp_r = +g_k, each of their labelled tokens the same, and dz_j = dlp_s ([j = a] - p_j)

Forward schedule: three kernels, each on the grid of what it makes: a token's owner walks the vocabulary for
lse and the label's log-probability, a sequence's owner sums its tokens, a tile of pairs makes u and l.
Backward schedule: the three stages run back without an intermediate tensor. A sequence's gradient is one
number, sign * g_k, so it is broadcast where it is used: each program of the grid (token, vocabulary tile)
makes it from the saved u of its pair, a handful of flops, rather than a kernel spreading it over tokens and
another reading it back. Tokens without a label (the prompt, the padding) write zeros and read no logit: the
prompt is often most of the sequence.

op: dpo_loss
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 4
dtypes: fp32, bf16
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def token_logp_kernel(z_ptr, label_ptr, lp_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + token)
    m = -float("inf")
    s = 0.0
    for start in range(0, tl.where(label >= 0, V, 0), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + token * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    lse = tl.where(label >= 0, m + tl.log(s), 0.0)
    z_label = tl.load(z_ptr + token * V + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(lse_ptr + token, lse)
    tl.store(lp_ptr + token, z_label - lse)


@triton.jit
def sequence_sum_kernel(lp_ptr, sum_ptr, T, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += tl.load(lp_ptr + sequence * T + t, mask=t < T, other=0.0)
    tl.store(sum_ptr + sequence, tl.sum(total, axis=0))


@triton.jit
def pair_loss_kernel(sum_ptr, ref_ptr, u_ptr, loss_ptr, pairs, beta, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = k < pairs
    chosen = tl.load(sum_ptr + k, mask=mask, other=0.0) - tl.load(ref_ptr + k, mask=mask, other=0.0)
    rejected = tl.load(sum_ptr + pairs + k, mask=mask, other=0.0)
    rejected -= tl.load(ref_ptr + pairs + k, mask=mask, other=0.0)
    u = beta * (chosen - rejected)
    # exp of no positive number, and no kink at u = 0, where every pair is before the first step
    loss = tl.where(u < 0, -u, 0.0) + tl.log(1 + tl.exp(tl.where(u < 0, u, -u)))
    tl.store(u_ptr + k, u, mask=mask)
    tl.store(loss_ptr + k, loss, mask=mask)


def dpo_forward(logits, labels, ref, beta):
    sequences, T, V = logits.shape
    if sequences % 2:
        raise ValueError(f"{sequences} sequences are not pairs")
    pairs = sequences // 2
    lp, lse = torch.empty((2, sequences, T), device=logits.device, dtype=torch.float32)
    sums = torch.empty(sequences, device=logits.device, dtype=torch.float32)
    u, loss = (torch.empty(pairs, device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK = min(2048, triton.next_power_of_2(V))
    token_logp_kernel[(sequences * T,)](logits, labels, lp, lse, V, BLOCK=BLOCK)
    sequence_sum_kernel[(sequences,)](lp, sums, T, BLOCK=256)
    pair_loss_kernel[(triton.cdiv(pairs, 64),)](sums, ref.contiguous(), u, loss, pairs, beta, BLOCK=64)
    return loss, lse, u


@autodiff(inputs_require_grad=(0,))
def dpo_loss(logits, labels, ref, beta=0.1):
    """logits: (2 pairs, T, V), all chosen answers, then all rejected ones; labels: int64 (2 pairs, T),
    negative where a token does not count; ref: float32 (2 pairs). Gives float32 (pairs)."""
    return dpo_forward(logits.contiguous(), labels.contiguous(), ref, beta)[0]


def reference(logits, labels, ref, beta=0.1):
    lp = torch.log_softmax(logits, dim=-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    chosen, rejected = (torch.where(labels >= 0, lp, 0).sum(1) - ref).chunk(2)
    return torch.nn.functional.softplus(-beta * (chosen - rejected))


SWEEP = [{"pairs": 2, "T": 256, "V": 32000}, {"pairs": 1, "T": 131, "V": 128256}]
SWEEP_CPU = [{"pairs": 2, "T": 7, "V": 60}, {"pairs": 1, "T": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    sequences, T, V = 2 * dims["pairs"], dims["T"], dims["V"]
    logits = torch.randn(sequences, T, V, device=device, dtype=dtype)
    labels = torch.randint(0, V, (sequences, T), device=device)
    labels[:, : T // 3] = -100
    ref = torch.where(labels >= 0, -math.log(V), 0.0).sum(1) + torch.randn(sequences, device=device)
    return logits, labels, ref


# ---- backward ----


@triton.jit
def dpo_backward_kernel(
    z_ptr, label_ptr, lse_ptr, u_ptr, dloss_ptr, dz_ptr, pairs, T, V, beta, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = token // T
    k = sequence % pairs
    g = tl.load(dloss_ptr + k) * beta * tl.sigmoid(-tl.load(u_ptr + k))
    dlp = tl.where(sequence < pairs, -g, g)
    label = tl.load(label_ptr + token)
    z = tl.load(z_ptr + token * V + cols, mask=(cols < V) & (label >= 0), other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(lse_ptr + token))
    dz = tl.where(label >= 0, dlp * (tl.where(cols == label, 1.0, 0.0) - p), 0.0)
    tl.store(dz_ptr + token * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


class DPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ref, beta):
        logits, labels = logits.contiguous(), labels.contiguous()
        loss, lse, u = dpo_forward(logits, labels, ref, beta)
        ctx.save_for_backward(logits, labels, lse, u)
        ctx.beta = beta
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, lse, u = ctx.saved_tensors
        sequences, T, V = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        dpo_backward_kernel[(sequences * T, triton.cdiv(V, BLOCK))](
            logits, labels, lse, u, dloss.contiguous(), dz, sequences // 2, T, V, ctx.beta, BLOCK=BLOCK
        )
        return dz, None, None, None


def dpo_loss_autograd(logits, labels, ref, beta=0.1):
    return DPOLoss.apply(logits, labels, ref, beta)
