"""Distillation from a teacher of whom only the K most likely tokens of each position were stored.

Forward    q_k at tokens i_k, k = 1..K, the teacher's probabilities, Q = sum_k q_k (less than 1: the rest was
           not stored);  l = sum_k q_k (log q_k - z_{i_k} + lse(z)), one loss a row
Backward   dz_j = dl (Q p_j - [j = i_k] q_k),  p_j = exp(z_j - lse)

Forward schedule: a row's owner walks the vocabulary once for lse, then gathers the K logits in one tile. A
dense teacher would be as large as the logits and almost all zeros; here it is K numbers a row.
Backward schedule: the dense part first, (row, vocabulary tile) programs with lse and Q saved, which know
nothing of the targets: to compare each lane with K tokens would cost K times the work. Then the K tokens of a
row, distinct, are K addresses that a second kernel owns: it stores their whole gradient again, made from
z, lse and q, and does not add -dl q to what is there. So nothing is read back, no atomic is needed, and the
order of the launches is all that the two agree on.

op: topk_kl
schedule: recompute_from_stats, same_tile_pointwise, index_or_seed_replay
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def topk_kl_kernel(
    z_ptr, q_ptr, token_ptr, loss_ptr, lse_ptr, mass_ptr, V, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    lse = m + tl.log(total)
    k = tl.arange(0, BLOCK_K)
    q = tl.load(q_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    token = tl.load(token_ptr + row * K + k, mask=k < K, other=0)
    z = tl.load(z_ptr + row * V + token, mask=k < K, other=0.0).to(tl.float32)
    log_q = tl.log(tl.where(q > 0, q, 1.0))
    tl.store(lse_ptr + row, lse)
    tl.store(mass_ptr + row, tl.sum(q, axis=0))
    tl.store(loss_ptr + row, tl.sum(tl.where(k < K, q * (log_q - z + lse), 0.0), axis=0))


def topk_kl_forward(logits, probabilities, tokens):
    (M, V), K = logits.shape, tokens.shape[1]
    if probabilities.shape != tokens.shape or tokens.shape[0] != M or K > 1024:
        raise ValueError("probabilities and tokens are (M, K) with K of up to 1024")
    loss, lse, mass = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    topk_kl_kernel[(M,)](
        logits, probabilities, tokens, loss, lse, mass, V, K,
        BLOCK=min(2048, triton.next_power_of_2(V)), BLOCK_K=triton.next_power_of_2(K),
    )  # fmt: skip
    return loss, lse, mass


@autodiff(inputs_require_grad=(0,))
def topk_kl(logits, probabilities, tokens):
    """logits: (M, V); probabilities: (M, K), constants; tokens: int64 (M, K), those of a row distinct; gives
    (M) in float32."""
    return topk_kl_forward(logits.contiguous(), probabilities.contiguous(), tokens.contiguous())[0]


def reference(logits, probabilities, tokens):
    log_p = torch.log_softmax(logits, dim=-1).gather(1, tokens)
    log_q = torch.log(torch.where(probabilities > 0, probabilities, 1.0))
    return (probabilities * (log_q - log_p)).sum(-1)


SWEEP = [{"M": 1024, "V": 128256, "K": 64}, {"M": 4093, "V": 32000, "K": 20}]
SWEEP_CPU = [{"M": 18, "V": 210, "K": 7}, {"M": 3, "V": 2100, "K": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, V, K = dims["M"], dims["V"], dims["K"]
    logits = 2 * torch.randn(M, V, device=device, dtype=dtype)
    teacher = torch.softmax(3 * torch.randn(M, V, device=device), dim=-1)
    probabilities, tokens = teacher.topk(min(K, V), dim=-1)
    return logits, probabilities.to(dtype), tokens


# ---- backward ----


@triton.jit
def dense_kernel(z_ptr, lse_ptr, mass_ptr, dloss_ptr, dz_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
    dz = tl.load(dloss_ptr + row) * tl.load(mass_ptr + row) * tl.exp(z - tl.load(lse_ptr + row))
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def target_kernel(
    z_ptr, q_ptr, token_ptr, lse_ptr, mass_ptr, dloss_ptr, dz_ptr, V, K, BLOCK_K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    q = tl.load(q_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    place = row * V + tl.load(token_ptr + row * K + k, mask=k < K, other=0)
    z = tl.load(z_ptr + place, mask=k < K, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(lse_ptr + row))
    dz = tl.load(dloss_ptr + row) * (tl.load(mass_ptr + row) * p - q)
    tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=k < K)


class TopKKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, probabilities, tokens):
        logits, probabilities, tokens = logits.contiguous(), probabilities.contiguous(), tokens.contiguous()
        loss, lse, mass = topk_kl_forward(logits, probabilities, tokens)
        ctx.save_for_backward(logits, probabilities, tokens, lse, mass)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, probabilities, tokens, lse, mass = ctx.saved_tensors
        (M, V), K = logits.shape, tokens.shape[1]
        dloss, dz = dloss.contiguous(), torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        dense_kernel[(M, triton.cdiv(V, BLOCK))](logits, lse, mass, dloss, dz, V, BLOCK=BLOCK)
        target_kernel[(M,)](
            logits, probabilities, tokens, lse, mass, dloss, dz, V, K, BLOCK_K=triton.next_power_of_2(K)
        )
        return dz, None, None


def topk_kl_autograd(logits, probabilities, tokens):
    return TopKKL.apply(logits, probabilities, tokens)
