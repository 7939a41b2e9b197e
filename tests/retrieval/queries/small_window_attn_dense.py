import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def tiny_attention(Q, K, V, O, L, SCALE, LP: tl.constexpr, D: tl.constexpr):
    h = tl.program_id(0)
    i = tl.arange(0, LP)
    d = tl.arange(0, D)
    at = h * L * D + i[:, None] * D + d[None, :]
    live = (i < L)[:, None]
    q = tl.load(Q + at, mask=live, other=0.0)
    k = tl.load(K + at, mask=live, other=0.0)
    v = tl.load(V + at, mask=live, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
    s = tl.where((i[None, :] <= i[:, None]) & (i[None, :] < L), s, float("-inf"))
    s = tl.exp(s - tl.max(s, 1, keep_dims=True))
    p = s / tl.sum(s, 1, keep_dims=True)
    tl.store(O + at, tl.dot(p, v, input_precision="ieee"), mask=live)


@autodiff(inputs_require_grad=(0, 1, 2))
def window_tokens(q, k, v):
    H, L, D = q.shape
    o = torch.empty_like(q)
    tiny_attention[(H,)](q, k, v, o, L, D**-0.5, LP=max(16, triton.next_power_of_2(L)), D=D)
    return o
