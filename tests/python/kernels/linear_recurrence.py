"""Gated linear attention, step by step: S = g_t * S + k_t v_t^T, o_t = S^T q_t; decay learned or constant."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [
    {"B": 2, "T": 10, "K": 8, "V": 16, "DECAY": "learned"},
    {"B": 1, "T": 6, "K": 8, "V": 8, "DECAY": "constant"},
]


@triton.jit
def recurrence_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, steps, K: tl.constexpr, V: tl.constexpr, LEARNED: tl.constexpr
):
    batch = tl.program_id(0)
    at_k = batch * steps * K + tl.arange(0, K)
    at_v = batch * steps * V + tl.arange(0, V)
    state = tl.zeros([K, V], dtype=tl.float32)
    for t in range(steps):
        q = tl.load(q_ptr + at_k + t * K).to(tl.float32)
        k = tl.load(k_ptr + at_k + t * K).to(tl.float32)
        v = tl.load(v_ptr + at_v + t * V).to(tl.float32)
        if LEARNED:
            g = tl.load(g_ptr + at_k + t * K).to(tl.float32)
            state = state * tl.exp(g)[:, None] + k[:, None] * v[None, :]
        else:
            state = state * 0.9 + k[:, None] * v[None, :]
        tl.store(o_ptr + at_v + t * V, tl.sum(state * q[:, None], 0))


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def recurrence(q, k, v, g, learned=True):
    b, t, dk = q.shape
    dv = v.shape[2]
    o = torch.empty((b, t, dv), device=q.device, dtype=q.dtype)
    recurrence_kernel[(b,)](q, k, v, g, o, t, K=dk, V=dv, LEARNED=learned)
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    b, t = dims["B"], dims["T"]
    q, k, v = (torch.randn(b, t, dims[d], device=device, dtype=dtype) for d in ("K", "K", "V"))
    g = -torch.rand(b, t, dims["K"], device=device, dtype=dtype)
    return (q, k, v, g), {"learned": dims["DECAY"] == "learned"}


def reference(q, k, v, g, learned=True):
    state, out = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        decay = torch.exp(g[:, t])[:, :, None] if learned else 0.9
        state = state * decay + k[:, t, :, None] * v[:, t, None, :]
        out.append((state * q[:, t, :, None]).sum(1))
    return torch.stack(out, 1)
