import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sm_drop(S, P, n, p_drop, seed, BLK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLK)
    s = tl.load(S + row * n + j, mask=j < n, other=float("-inf"))
    s = tl.exp(s - tl.max(s, 0))
    s = s / tl.sum(s, 0)
    keep = tl.rand(seed, row * n + j) >= p_drop
    tl.store(P + row * n + j, tl.where(keep, s / (1 - p_drop), 0.0), mask=j < n)


@autodiff(inputs_require_grad=(0,))
def attention_probs(scores, p_drop=0.1, seed=11):
    out = torch.empty_like(scores)
    n = scores.shape[-1]
    sm_drop[(scores.numel() // n,)](scores, out, n, p_drop, seed, BLK=triton.next_power_of_2(n))
    return out
