"""Causal linear attention in chunks: kernel 1 makes chunk states, the host sums them, kernel 2 the
outputs."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "T": 64, "D": 16}]


@triton.jit
def state_kernel(k_ptr, v_ptr, s_ptr, t, D: tl.constexpr, C: tl.constexpr):
    chunk = tl.program_id(0)
    batch = tl.program_id(1)
    dims = tl.arange(0, D)
    rows = chunk * C + tl.arange(0, C)
    at = (batch * t + rows)[:, None] * D + dims[None, :]
    k = tl.load(k_ptr + at)
    v = tl.load(v_ptr + at)
    out = s_ptr + ((batch * tl.num_programs(0) + chunk) * D + dims)[:, None] * D + dims[None, :]
    tl.store(out, tl.dot(tl.trans(k), v, input_precision="ieee"))


@triton.jit
def output_kernel(q_ptr, k_ptr, v_ptr, s_ptr, o_ptr, t, D: tl.constexpr, C: tl.constexpr):
    chunk = tl.program_id(0)
    batch = tl.program_id(1)
    dims = tl.arange(0, D)
    steps = tl.arange(0, C)
    at = (batch * t + chunk * C + steps)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at)
    k = tl.load(k_ptr + at)
    v = tl.load(v_ptr + at)
    state = tl.load(s_ptr + ((batch * tl.num_programs(0) + chunk) * D + dims)[:, None] * D + dims[None, :])
    a = tl.where(steps[:, None] >= steps[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
    o = tl.dot(a.to(v.dtype), v, input_precision="ieee") + tl.dot(q, state, input_precision="ieee")
    tl.store(o_ptr + at, o)


@autodiff(inputs_require_grad=(0, 1, 2))
def chunk_linear_attention(q, k, v):
    b, t, d = q.shape
    chunks = t // 16
    s = torch.empty((b, chunks, d, d), device=q.device, dtype=q.dtype)
    state_kernel[(chunks, b)](k, v, s, t, D=d, C=16)
    before = torch.zeros_like(s)
    before[:, 1:] = torch.cumsum(s, dim=1)[:, :-1]
    o = torch.empty_like(q)
    output_kernel[(chunks, b)](q, k, v, before, o, t, D=d, C=16)
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype) for _ in range(3))


def reference(q, k, v):
    return torch.tril(q @ k.transpose(1, 2)) @ v
