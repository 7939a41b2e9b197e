"""GRPO from logits, one loss a token: a clipped ratio, and a penalty for leaving the reference model.

Forward    lp = z_a / T - lse(z / T) for the token a that was sampled,  r = exp(lp - old),  d = ref - lp,
           l = -min(r A, clip(r, 1 - lo, 1 + hi) A) + k (exp(d) - d - 1);  0 where the token does not count
Backward   dl/dlp = -A r [the ratio is not held by the clip] + k (1 - exp(d)) =: c, and
           dlp/dz_j = ([j = a] - p_j) / T with p = softmax(z / T), so dz_j = dl c ([j = a] - p_j) / T.
           The clip holds where r A is the larger of the two: A > 0 and r > 1 + hi, or A < 0 and r < 1 - lo

Forward schedule: a program owns a token and walks its vocabulary once for an online lse; what follows is
arithmetic on one number, and c is made beside l, when all it needs is at hand. lse and c are saved.
Backward schedule: c replays the branch that the forward took, so the backward knows nothing of ratios,
advantages or the reference model: a grid of (token, vocabulary tile) reads z once and writes dz once, with
one exp an element. A token that does not count has c = 0: its tiles write zeros and do not read z.

op: grpo_loss
schedule: recompute_from_stats, index_or_seed_replay, same_tile_pointwise
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def token_loss_kernel(
    z_ptr, token_ptr, old_ptr, ref_ptr, advantage_ptr, counts_ptr, loss_ptr, lse_ptr, c_ptr, length, V,
    temperature, low, high, kl_weight, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + i * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32) / temperature
        m_new = tl.maximum(m, tl.max(z, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    lse = m + tl.log(s)
    lp = tl.load(z_ptr + i * V + tl.load(token_ptr + i)).to(tl.float32) / temperature - lse
    A = tl.load(advantage_ptr + i // length)
    r = tl.exp(lp - tl.load(old_ptr + i))
    d = tl.load(ref_ptr + i) - lp
    clipped = tl.minimum(tl.maximum(r, 1 - low), 1 + high)
    counts = tl.load(counts_ptr + i) != 0
    loss = -tl.minimum(r * A, clipped * A) + kl_weight * (tl.exp(d) - d - 1)
    c = tl.where(r * A <= clipped * A, -r * A, 0.0) + kl_weight * (1 - tl.exp(d))
    tl.store(lse_ptr + i, lse)
    tl.store(loss_ptr + i, tl.where(counts, loss, 0.0))
    tl.store(c_ptr + i, tl.where(counts, c, 0.0))


def grpo_forward(logits, tokens, old, ref, advantages, counts, temperature, low, high, kl_weight):
    B, T, V = logits.shape
    loss, lse, c = (torch.empty((B, T), device=logits.device, dtype=torch.float32) for _ in range(3))
    token_loss_kernel[(B * T,)](
        logits, tokens.contiguous(), old.contiguous(), ref.contiguous(), advantages.contiguous(),
        counts.contiguous(), loss, lse, c, T, V, temperature, low, high, kl_weight,
        BLOCK=min(2048, triton.next_power_of_2(V)),
    )  # fmt: skip
    return loss, lse, c


@autodiff(inputs_require_grad=(0,))
def grpo_loss(
    logits, tokens, old, ref, advantages, counts, temperature=0.9, low=0.2, high=0.28, kl_weight=0.04
):
    """logits: (B, T, V); tokens, counts: int64 (B, T); old, ref: float32 (B, T), log-probabilities;
    advantages: float32 (B). Gives a loss a token, float32 (B, T)."""
    return grpo_forward(
        logits.contiguous(), tokens, old, ref, advantages, counts, temperature, low, high, kl_weight
    )[0]


def reference(
    logits, tokens, old, ref, advantages, counts, temperature=0.9, low=0.2, high=0.28, kl_weight=0.04
):
    lp = torch.log_softmax(logits / temperature, dim=-1).gather(2, tokens[..., None])[..., 0]
    r, d, A = torch.exp(lp - old), ref - lp, advantages[:, None]
    policy = torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)
    return (kl_weight * (torch.exp(d) - d - 1) - policy) * (counts != 0)


SWEEP = [{"B": 4, "T": 256, "V": 32000}, {"B": 3, "T": 101, "V": 151936}]
SWEEP_CPU = [{"B": 3, "T": 9, "V": 70}, {"B": 1, "T": 2, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, V = dims["B"], dims["T"], dims["V"]
    logits = torch.randn(B, T, V, device=device, dtype=dtype)
    tokens = torch.randint(0, V, (B, T), device=device)
    lp = torch.log_softmax(logits.float() / 0.9, dim=-1).gather(2, tokens[..., None])[..., 0]
    old = lp + 0.3 * torch.randn(B, T, device=device)
    off = 0.05 + 0.3 * torch.rand(B, T, device=device)  # where lp = ref, 1 - exp(d) has no digits left
    ref = torch.where(torch.rand(B, T, device=device) < 0.5, lp - off, lp + off)
    advantages = torch.randn(B, device=device)
    return logits, tokens, old, ref, advantages, (torch.rand(B, T, device=device) < 0.8).long()


# ---- backward ----


@triton.jit
def grpo_backward_kernel(
    z_ptr, token_ptr, lse_ptr, c_ptr, dloss_ptr, dz_ptr, V, temperature, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.load(c_ptr + i)
    read = tl.where(c != 0, V, 0)  # columns
    z = tl.load(z_ptr + i * V + cols, mask=cols < read, other=0.0).to(tl.float32)
    p = tl.exp(z / temperature - tl.load(lse_ptr + i))
    hit = tl.where(cols == tl.load(token_ptr + i), 1.0, 0.0)
    dz = tl.where(c != 0, tl.load(dloss_ptr + i) * (c / temperature) * (hit - p), 0.0)
    tl.store(dz_ptr + i * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


class GRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, old, ref, advantages, counts, temperature, low, high, kl_weight):
        logits, tokens = logits.contiguous(), tokens.contiguous()
        loss, lse, c = grpo_forward(
            logits, tokens, old, ref, advantages, counts, temperature, low, high, kl_weight
        )
        ctx.save_for_backward(logits, tokens, lse, c)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, tokens, lse, c = ctx.saved_tensors
        V = logits.shape[-1]
        dz = torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        grpo_backward_kernel[(lse.numel(), triton.cdiv(V, BLOCK))](
            logits, tokens, lse, c, dloss.contiguous(), dz, V, ctx.temperature, BLOCK=BLOCK
        )
        return dz, *[None] * 9


def grpo_loss_autograd(
    logits, tokens, old, ref, advantages, counts, temperature=0.9, low=0.2, high=0.28, kl_weight=0.04
):
    return GRPOLoss.apply(logits, tokens, old, ref, advantages, counts, temperature, low, high, kl_weight)
