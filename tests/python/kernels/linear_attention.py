"""Linear attention without decay, step by step: S += k_t v_t^T, o_t = S^T q_t; a recurrence that only
adds."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "T": 7, "K": 8, "V": 16}, {"B": 1, "T": 1, "K": 16, "V": 8}]


@triton.jit
def additive_kernel(q_ptr, k_ptr, v_ptr, o_ptr, steps, K: tl.constexpr, V: tl.constexpr):
    batch = tl.program_id(0)
    at_k = batch * steps * K + tl.arange(0, K)
    at_v = batch * steps * V + tl.arange(0, V)
    state = tl.zeros([K, V], dtype=tl.float32)
    for t in range(steps):
        q = tl.load(q_ptr + at_k + t * K)
        k = tl.load(k_ptr + at_k + t * K)
        v = tl.load(v_ptr + at_v + t * V)
        state += k[:, None] * v[None, :]
        tl.store(o_ptr + at_v + t * V, tl.sum(state * q[:, None], 0))


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_attention(q, k, v):
    b, t, dk = q.shape
    dv = v.shape[2]
    o = torch.empty((b, t, dv), device=q.device, dtype=q.dtype)
    additive_kernel[(b,)](q, k, v, o, t, K=dk, V=dv)
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    b, t = dims["B"], dims["T"]
    return tuple(torch.randn(b, t, dims[d], device=device, dtype=dtype) for d in ("K", "K", "V"))


def reference(q, k, v):
    return torch.einsum(
        "btk,bsk,ts,bsv->btv", q, k, torch.ones(q.shape[1], q.shape[1], dtype=q.dtype).tril(), v
    )
