"""Loss of a causal language model: each position predicts the next token, and no shifted copy is made.

Forward    logits z (B, T, V), tokens y (B, T):  position t has the target y_{t+1}, the last has none, nor has
           one whose target is the padding -1;  L = (1 / n) sum of lse(z_t) - z_{t, target} over the n others
Backward   dz_tj = (dL / n) (exp(z_tj - lse_t) - [j = target]), and 0 where there is no target

Forward schedule: logits[:, :-1].contiguous() costs a copy of the largest tensor of a model. The shift is in
the labels instead: row (b, t) of the logits, where they lie, looks up token t + 1 of its sequence. A row
without a target is not walked. One program adds losses and counts targets, from two numbers a row.
Backward schedule: the gradient of the slice would be a second large tensor, copied into a third with a last
row of zeros. Here the last row's programs store the zeros as others store their tile, so dz is written once.
A program owns (row, vocabulary tile) and rebuilds the softmax from lse. It looks the target up as the forward
did: a row whose target is absent reads no logit.

op: causal_lm_loss
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
def target_of(token_ptr, row, T):
    """The token after a row's own in its sequence, or -1."""
    return tl.load(token_ptr + row + 1, mask=row % T != T - 1, other=-1)


@triton.jit
def row_loss_kernel(z_ptr, token_ptr, row_loss_ptr, lse_ptr, T, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = target_of(token_ptr, row, T)
    counts = target >= 0
    m = -float("inf")
    total = 0.0
    for start in range(0, tl.where(counts, V, 0), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    lse = tl.where(counts, m + tl.log(total), 0.0)
    z_target = tl.load(z_ptr + row * V + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(row_loss_ptr + row, lse - z_target)


@triton.jit
def mean_kernel(row_loss_ptr, token_ptr, loss_ptr, count_ptr, rows, T, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(row_loss_ptr + row, mask=row < rows, other=0.0)
        target = tl.load(token_ptr + row + 1, mask=(row < rows) & (row % T != T - 1), other=-1)
        count += (target >= 0).to(tl.int32)
    n = tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(count_ptr, n)
    tl.store(loss_ptr, tl.sum(total, axis=0) / n)


def causal_lm_forward(logits, tokens):
    B, T, V = logits.shape
    if tokens.shape != (B, T):
        raise ValueError("there is a token for each position of the logits")
    row_loss, lse = (torch.empty(B * T, device=logits.device, dtype=torch.float32) for _ in range(2))
    loss, count = (torch.empty((), device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK = min(2048, triton.next_power_of_2(V))
    row_loss_kernel[(B * T,)](logits, tokens, row_loss, lse, T, V, BLOCK=BLOCK)
    mean_kernel[(1,)](row_loss, tokens, loss, count, B * T, T, BLOCK=1024)
    return loss, lse, count


@autodiff(inputs_require_grad=(0,))
def causal_lm_loss(logits, tokens):
    """logits: (B, T, V); tokens: int64 (B, T), -1 for padding; gives a number, float32, 0 without targets."""
    return causal_lm_forward(logits.contiguous(), tokens.contiguous())[0]


def reference(logits, tokens):
    z, y = logits[:, :-1], tokens[:, 1:]
    loss = z.logsumexp(-1) - z.gather(2, y.clamp(min=0)[..., None])[..., 0]
    return torch.where(y >= 0, loss, 0.0).sum() / (y >= 0).sum().clamp(min=1)


SWEEP = [{"B": 2, "T": 2048, "V": 50257}, {"B": 3, "T": 509, "V": 128256}]
SWEEP_CPU = [{"B": 3, "T": 7, "V": 130}, {"B": 1, "T": 4, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, V = dims["B"], dims["T"], dims["V"]
    tokens = torch.randint(0, V, (B, T), device=device)
    tokens[:, 2::5] = -1
    return 2 * torch.randn(B, T, V, device=device, dtype=dtype), tokens


# ---- backward ----


@triton.jit
def causal_lm_backward_kernel(
    z_ptr, token_ptr, lse_ptr, count_ptr, dloss_ptr, dz_ptr, T, V, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = target_of(token_ptr, row, T)
    counts = target >= 0
    z = tl.load(z_ptr + row * V + cols, mask=(cols < V) & counts, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(lse_ptr + row))
    g = tl.load(dloss_ptr).to(tl.float32) / tl.load(count_ptr)
    dz = tl.where(counts, g * (p - tl.where(cols == target, 1.0, 0.0)), 0.0)
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < V)


class CausalLMLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens):
        logits, tokens = logits.contiguous(), tokens.contiguous()
        loss, lse, count = causal_lm_forward(logits, tokens)
        ctx.save_for_backward(logits, tokens, lse, count)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, tokens, lse, count = ctx.saved_tensors
        B, T, V = logits.shape
        dz = torch.empty_like(logits)
        BLOCK = min(2048, triton.next_power_of_2(V))
        causal_lm_backward_kernel[(B * T, triton.cdiv(V, BLOCK))](
            logits, tokens, lse, count, dloss, dz, T, V, BLOCK=BLOCK
        )
        return dz, None


def causal_lm_loss_autograd(logits, tokens):
    return CausalLMLoss.apply(logits, tokens)
