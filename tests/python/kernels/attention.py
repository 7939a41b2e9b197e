"""Flash attention: online softmax, causal in two inner calls or not, grouped-query heads, log-sum-exp."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [
    {"B": 1, "H": 2, "KV": 1, "N": 70, "D": 16, "CAUSAL": True},
    {"B": 2, "H": 2, "KV": 2, "N": 64, "D": 16, "CAUSAL": False},
]


@triton.jit
def inner(
    q,
    k_ptr,
    v_ptr,
    m,
    l,
    acc,
    rows,
    low,
    high,
    n,
    scale,
    D: tl.constexpr,
    BN: tl.constexpr,
    MASK: tl.constexpr,
):
    dims = tl.arange(0, D)
    for start in range(low, high, BN):
        cols = start + tl.arange(0, BN)
        inside = cols < n
        k = tl.load(k_ptr + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        keep = inside[None, :]
        if MASK:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n, heads, per_kv, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    kv = (head // heads) * (heads // per_kv) + (head % heads) // per_kv
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    at = head * n * D + rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    k_ptr += kv * n * D
    v_ptr += kv * n * D
    m = tl.full([BM], -1.0e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    scale *= 1.44269504
    if CAUSAL:
        m, l, acc = inner(q, k_ptr, v_ptr, m, l, acc, rows, 0, block * BM, n, scale, D, BN, False)
        high = tl.minimum((block + 1) * BM, n)
        m, l, acc = inner(q, k_ptr, v_ptr, m, l, acc, rows, block * BM, high, n, scale, D, BN, True)
    else:
        m, l, acc = inner(q, k_ptr, v_ptr, m, l, acc, rows, 0, n, n, scale, D, BN, False)
    tl.store(o_ptr + at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < n)
    tl.store(lse_ptr + head * n + rows, m + tl.log2(l), mask=rows < n)


@autodiff(inputs_require_grad=(0, 1, 2))
def attention(q, k, v, causal):
    b, h, n, d = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((b, h, n), device=q.device, dtype=torch.float32)
    per_kv = h // k.shape[1]
    attention_kernel[(triton.cdiv(n, 32), b * h)](
        q, k, v, o, lse, n, h, per_kv, d**-0.5, D=d, BM=32, BN=16, CAUSAL=causal
    )
    return o, lse.detach()


def make_args(dims, device="cuda", dtype=torch.float32):
    b, n, d = dims["B"], dims["N"], dims["D"]
    q, k, v = (torch.randn(b, dims[h], n, d, device=device, dtype=dtype) for h in ("H", "KV", "KV"))
    return q, k, v, dims["CAUSAL"]


def reference(q, k, v, causal):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[2]
        s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), -float("inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1).detach() * 1.4426950408889634
