"""Log-probability of the sampled token and entropy of the policy, both of one walk over the logits.

Forward    at temperature T:  u = z / T,  lse = log sum_j e^{u_j},  p_j = e^{u_j - lse};
           l = u_y - lse for the sampled token y,  H = lse - sum_j p_j u_j
Backward   dl/du_j = [j = y] - p_j,  dH/du_j = -p_j (log p_j + H); with dl and dH the two upstreams,
           dz_j = (1 / T) (dl [j = y] - p_j (dl + dH (log p_j + H)))

Forward schedule: policy optimisation wants both numbers of the same logits, tens of gigabytes of a batch;
they differ in one sum. A row's owner keeps m, s = sum e^{u - m} and w = sum e^{u - m} (u - m); a larger
maximum m' turns w to (w + (m - m') s) e^{m - m'}. Then H = log s - w / s, in which nothing large cancels.
Backward schedule: (row, vocabulary tile) programs with lse and H saved; what the two outputs share, p and log
p, is made once, and their gradients meet in registers, in one read and one write where two losses would take
two reads, two writes and an addition. Either upstream may be absent, and is zeros then.

op: policy_logp_entropy
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
def policy_kernel(
    z_ptr, token_ptr, logp_ptr, entropy_ptr, lse_ptr, V, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = -1e30  # finite, for differences of it
    s = 0.0
    w = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        z = tl.load(z_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
        u = z / temperature
        m_new = tl.maximum(m, tl.max(u, axis=0))
        below = tl.where(mask, u - m_new, 0.0)
        e = tl.where(mask, tl.exp(below), 0.0)
        old = tl.exp(m - m_new)
        w = (w + (m - m_new) * s) * old + tl.sum(e * below, axis=0)
        s = s * old + tl.sum(e, axis=0)
        m = m_new
    lse = m + tl.log(s)
    z_y = tl.load(z_ptr + row * V + tl.load(token_ptr + row)).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(logp_ptr + row, z_y / temperature - lse)
    tl.store(entropy_ptr + row, tl.log(s) - w / s)


def policy_forward(logits, tokens, temperature):
    M, V = logits.shape
    logp, entropy, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    BLOCK = min(2048, triton.next_power_of_2(V))
    policy_kernel[(M,)](logits, tokens, logp, entropy, lse, V, temperature, BLOCK=BLOCK)
    return logp, entropy, lse


@autodiff(inputs_require_grad=(0,))
def policy_logp_entropy(logits, tokens, temperature=1.0):
    """logits: (M, V); tokens: int64 (M); gives log-probabilities and entropies, (M) each, in float32."""
    logp, entropy, _ = policy_forward(logits.contiguous(), tokens.contiguous(), temperature)
    return logp, entropy


def reference(logits, tokens, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


SWEEP = [{"M": 2048, "V": 32000}, {"M": 509, "V": 151936}]
SWEEP_CPU = [{"M": 17, "V": 300}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, V = dims["M"], dims["V"]
    return 2 * torch.randn(M, V, device=device, dtype=dtype), torch.randint(0, V, (M,), device=device), 0.8


# ---- backward ----


@triton.jit
def policy_backward_kernel(
    z_ptr, token_ptr, lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, dz_ptr, V, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
    log_p = z / temperature - tl.load(lse_ptr + row)
    dlogp = tl.load(dlogp_ptr + row)
    of_p = dlogp + tl.load(dentropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    onehot = tl.where(cols == tl.load(token_ptr + row), dlogp, 0.0)
    dz = (onehot - tl.exp(log_p) * of_p) / temperature
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


class PolicyLogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        logits, tokens = logits.contiguous(), tokens.contiguous()
        logp, entropy, lse = policy_forward(logits, tokens, temperature)
        ctx.save_for_backward(logits, tokens, lse, entropy)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        logits, tokens, lse, entropy = ctx.saved_tensors
        M, V = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        policy_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            logits, tokens, lse, entropy, dlogp.contiguous(), dentropy.contiguous(), dz, V,
            ctx.temperature, BLOCK=BLOCK,
        )  # fmt: skip
        return dz, None, None


def policy_logp_entropy_autograd(logits, tokens, temperature=1.0):
    return PolicyLogpEntropy.apply(logits, tokens, temperature)
