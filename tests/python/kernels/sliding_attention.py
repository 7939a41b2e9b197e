"""Attention where a query sees only the last WINDOW keys."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 70, "D": 16, "WINDOW": 20}]


@triton.jit
def sliding_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    n,
    scale,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :], mask=rows[:, None] < n, other=0.0)
    m = tl.full([BM], -1.0e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    low = tl.maximum(block * BM - WINDOW, 0) // BN * BN
    for start in range(low, tl.minimum((block + 1) * BM, n), BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(k_ptr + cols[:, None] * D + dims[None, :], mask=cols[:, None] < n, other=0.0)
        v = tl.load(v_ptr + cols[:, None] * D + dims[None, :], mask=cols[:, None] < n, other=0.0)
        gap = rows[:, None] - cols[None, :]
        s = tl.where(
            (gap >= 0) & (gap < WINDOW), tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1.0e30
        )
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(s > -1.0e29, tl.exp(s - m_new[:, None]), 0.0)
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    tl.store(o_ptr + rows[:, None] * D + dims[None, :], acc / l[:, None], mask=rows[:, None] < n)


@autodiff(inputs_require_grad=(0, 1, 2))
def sliding(q, k, v, window):
    n, d = q.shape
    o = torch.empty_like(q)
    sliding_kernel[(triton.cdiv(n, 16),)](q, k, v, o, n, d**-0.5, D=d, WINDOW=window, BM=16, BN=16)
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    q, k, v = (torch.randn(dims["N"], dims["D"], device=device, dtype=dtype) for _ in range(3))
    return q, k, v, dims["WINDOW"]


def reference(q, k, v, window):
    n = q.shape[0]
    at = torch.arange(n, device=q.device)
    gap = at[:, None] - at[None, :]
    s = (q @ k.t() * q.shape[1] ** -0.5).masked_fill((gap < 0) | (gap >= window), -float("inf"))
    return torch.softmax(s, -1) @ v
