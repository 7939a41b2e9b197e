import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def expert_stats(logits, choice, prob_sum, hits, T, E, BT: tl.constexpr, BE: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    ok = (t < T)[:, None] & (e < E)[None, :]
    z = tl.load(logits + t[:, None] * E + e[None, :], mask=ok, other=-1e30)
    p = tl.exp(z - tl.max(z, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    c = tl.load(choice + t, mask=t < T, other=-1)
    tl.atomic_add(prob_sum + e, tl.sum(tl.where(ok, p, 0.0), 0), mask=e < E)
    tl.atomic_add(hits + e, tl.sum((c[:, None] == e[None, :]).to(tl.float32), 0), mask=e < E)


@triton.jit
def combine(prob_sum, hits, loss, T, E, BE: tl.constexpr):
    e = tl.arange(0, BE)
    p = tl.load(prob_sum + e, mask=e < E, other=0.0) / T
    f = tl.load(hits + e, mask=e < E, other=0.0) / T
    tl.store(loss, tl.sum(p * f) * E)


@autodiff(inputs_require_grad=(0,))
def balance_loss(logits, choice):
    T, E = logits.shape
    s = torch.zeros(2, E, device=logits.device)
    loss = torch.empty((), device=logits.device)
    expert_stats[(triton.cdiv(T, 32),)](logits, choice, s[0], s[1], T, E, 32, triton.next_power_of_2(E))
    combine[(1,)](s[0], s[1], loss, T, E, triton.next_power_of_2(E))
    return loss
