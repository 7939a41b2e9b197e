"""Causal attention of one head: a program owns a row of scores."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row, d, cols = tl.program_id(0), tl.arange(0, D), tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * D + d)
    inside = cols[:, None] < N
    k = tl.load(k_ptr + cols[:, None] * D + d[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + cols[:, None] * D + d[None, :], mask=inside, other=0.0)
    s = tl.where(cols <= row, tl.sum(k * q[None, :], axis=1) * scale, -float("inf"))
    p = tl.exp(s - tl.max(s, axis=0))
    p = p / tl.sum(p, axis=0)
    tl.store(o_ptr + row * D + d, tl.sum(p[:, None] * v, axis=0))


@autodiff(inputs_require_grad=(0, 1, 2))
def attention(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    N, D = q.shape
    o = torch.empty_like(q)
    attention_kernel[(N,)](q, k, v, o, N, D**-0.5, D=D, BLOCK=triton.next_power_of_2(N))
    return o


SWEEP = [{"N": 7, "D": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    q, k, v = (torch.randn(dims["N"], dims["D"], device=device, dtype=dtype) for _ in range(3))
    return q, k, v
