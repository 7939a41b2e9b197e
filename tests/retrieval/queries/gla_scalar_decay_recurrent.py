import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def recurrent_decay(q, k, v, g, o, T, K: tl.constexpr, V: tl.constexpr):
    h = tl.program_id(0)
    ki, vi = tl.arange(0, K), tl.arange(0, V)
    S = tl.zeros((K, V), tl.float32)
    for t in range(T):
        kt = tl.load(k + (h * T + t) * K + ki)
        vt = tl.load(v + (h * T + t) * V + vi)
        qt = tl.load(q + (h * T + t) * K + ki)
        S = S * tl.exp(tl.load(g + h * T + t)) + kt[:, None] * vt[None, :]
        tl.store(o + (h * T + t) * V + vi, tl.sum(S * qt[:, None], axis=0))


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def decayed_memory(q, k, v, g):
    o = torch.empty_like(v)
    recurrent_decay[(q.shape[0],)](q, k, v, g, o, q.shape[1], q.shape[2], v.shape[2])
    return o
