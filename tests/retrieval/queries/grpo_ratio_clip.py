import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def grpo_token(logits, ids, old, ref, adv, mask, loss, L, V, eps_lo, eps_hi, beta, BV: tl.constexpr):
    b, t = tl.program_id(0), tl.program_id(1)
    at = b * L + t
    if tl.load(mask + at) == 0:
        return
    row = logits + at.to(tl.int64) * V
    m = -float("inf")
    s = 0.0
    for i in range(0, V, BV):
        c = i + tl.arange(0, BV)
        x = tl.load(row + c, mask=c < V, other=-float("inf")).to(tl.float32)
        mn = tl.maximum(m, tl.max(x))
        s = s * tl.exp(m - mn) + tl.sum(tl.exp(x - mn))
        m = mn
    lp = tl.load(row + tl.load(ids + at)).to(tl.float32) - m - tl.log(s)
    r = tl.exp(lp - tl.load(old + at))
    rc = tl.minimum(tl.maximum(r, 1 - eps_lo), 1 + eps_hi)
    a = tl.load(adv + b)
    obj = -tl.minimum(r * a, rc * a)
    d = tl.load(ref + at) - lp
    tl.store(loss + at, obj + beta * (tl.exp(d) - d - 1))


@autodiff(inputs_require_grad=(0,))
def grpo(logits, ids, old, ref, adv, mask, beta=0.04):
    B, L, V = logits.shape
    loss = torch.zeros(B, L, device=logits.device)
    grpo_token[(B, L)](logits, ids, old, ref, adv, mask, loss, L, V, 0.2, 0.2, beta, BV=2048)
    return loss
