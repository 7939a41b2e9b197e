import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def seq_logp(lg, lab, out, T, V, BV: tl.constexpr):
    s = tl.program_id(0)
    total = 0.0
    for t in range(T):
        y = tl.load(lab + s * T + t)
        row = lg + (s * T + t) * V
        hi, z = -1e30, 0.0
        for v0 in range(0, V, BV):
            v = v0 + tl.arange(0, BV)
            x = tl.load(row + v, mask=v < V, other=-1e30).to(tl.float32)
            n = tl.maximum(hi, tl.max(x, 0))
            z = z * tl.exp(hi - n) + tl.sum(tl.exp(x - n), 0)
            hi = n
        lp = tl.load(row + tl.maximum(y, 0)).to(tl.float32) - hi - tl.log(z)
        total += tl.where(y >= 0, lp, 0.0)
    tl.store(out + s, total)


@triton.jit
def preference(lp, ref, loss, beta, n):
    i = tl.program_id(0)
    d = tl.load(lp + i) - tl.load(ref + i) - tl.load(lp + n + i) + tl.load(ref + n + i)
    z = beta * d
    tl.store(loss + i, tl.log(1 + tl.exp(-tl.abs(z))) - tl.minimum(z, 0.0))


@autodiff(inputs_require_grad=(0,))
def dpo(logits, labels, ref, beta=0.1):
    S, T, V = logits.shape
    lp = torch.empty(S, device=logits.device)
    loss = torch.empty(S // 2, device=logits.device)
    seq_logp[(S,)](logits, labels, lp, T, V, BV=1024)
    preference[(S // 2,)](lp, ref, loss, beta, S // 2)
    return loss
