"""Attention of a few queries over keys, with dropout of the weights drawn from a seed; the log of the
partition sum is an output of its own.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def drop_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, M, N, D, scale, p_drop, seed,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    m = tl.program_id(1)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv = (b * N + n[:, None]) * D + d[None, :]
    in_kv = (n[:, None] < N) & (d[None, :] < D)
    q = tl.load(q_ptr + (b * M + m) * D + d, mask=d < D, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + kv, mask=in_kv, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + kv, mask=in_kv, other=0.0).to(tl.float32)
    s = tl.where(n < N, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
    top = tl.max(s, axis=0)
    lse = top + tl.log(tl.sum(tl.exp(s - top), axis=0))
    p = tl.exp(s - lse)
    keep = tl.rand(seed, (b * M + m) * N + n) >= p_drop
    z = tl.where(keep, p / (1 - p_drop), 0.0)
    tl.store(o_ptr + (b * M + m) * D + d, tl.sum(z[:, None] * v, axis=0), mask=d < D)
    tl.store(lse_ptr + b * M + m, lse)


@autodiff(inputs_require_grad=(0, 1, 2))
def drop_attention(q, k, v, p_drop=0.2, seed=7):
    """q: (batch, M, D); k, v: (batch, N, D)."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, M, D = q.shape
    N = k.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty((B, M), device=q.device, dtype=torch.float32)
    drop_attention_kernel[(B, M)](
        q, k, v, o, lse, M, N, D, D**-0.5, p_drop, seed,
        BLOCK_N=triton.next_power_of_2(N), BLOCK_D=triton.next_power_of_2(D),
    )  # fmt: skip
    return o, lse


SWEEP = [{"B": 2, "M": 9, "N": 20, "D": 16}, {"B": 3, "M": 5, "N": 33, "D": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, D = dims["B"], dims["D"]
    q = torch.randn(B, dims["M"], D, device=device, dtype=dtype)
    k, v = (torch.randn(B, dims["N"], D, device=device, dtype=dtype) for _ in range(2))
    return (q, k, v), {"p_drop": 0.2, "seed": 7}
