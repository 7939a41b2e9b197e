import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def topk_gating(logits, weight, index, E, K: tl.constexpr, BE: tl.constexpr):
    t = tl.program_id(0)
    e = tl.arange(0, BE)
    z = tl.load(logits + t * E + e, mask=e < E, other=-float("inf"))
    p = tl.exp(z - tl.max(z, 0))
    p = p / tl.sum(p, 0)
    left = tl.where(e < E, p, -1.0)
    total = 0.0
    for k in range(K):
        i = tl.argmax(left, 0)
        v = tl.max(left, 0)
        tl.store(index + t * K + k, i)
        tl.store(weight + t * K + k, v)
        total += v
        left = tl.where(e == i, -1.0, left)
    tl.debug_barrier()
    k = tl.arange(0, K)
    tl.store(weight + t * K + k, tl.load(weight + t * K + k) / total)


@autodiff(inputs_require_grad=(0,))
def route(logits, k=4):
    T, E = logits.shape
    weight = torch.empty(T, k, device=logits.device)
    index = torch.empty(T, k, device=logits.device, dtype=torch.int32)
    topk_gating[(T,)](logits, weight, index, E, K=k, BE=triton.next_power_of_2(E))
    return weight, index
