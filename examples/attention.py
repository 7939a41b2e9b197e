"""Flash attention, causal or not: a program owns a tile of queries, walks the keys, and keeps a running
maximum, a running sum and an output accumulator, so that the N x N scores never reach memory.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    stride_b, stride_h, stride_n,
    H, N, D, scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    base = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_rows = (offs_m[:, None] < N) & (offs_d[None, :] < D)
    q = tl.load(q_ptr + base + offs_m[:, None] * stride_n + offs_d[None, :], mask=in_rows, other=0.0)

    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    end_n = tl.minimum(start_m + BLOCK_M, N) if CAUSAL else N
    for start_n in range(0, end_n, BLOCK_N):
        cols = start_n + offs_n
        in_cols = (cols[:, None] < N) & (offs_d[None, :] < D)
        k = tl.load(k_ptr + base + cols[:, None] * stride_n + offs_d[None, :], mask=in_cols, other=0.0)
        v = tl.load(v_ptr + base + cols[:, None] * stride_n + offs_d[None, :], mask=in_cols, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * log2e)
        visible = cols[None, :] < N
        if CAUSAL:
            visible = visible & (cols[None, :] <= offs_m[:, None])
        s = tl.where(visible, s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max

    o = acc / row_sum[:, None]
    tl.store(
        o_ptr + base + offs_m[:, None] * stride_n + offs_d[None, :],
        o.to(o_ptr.dtype.element_ty),
        mask=in_rows,
    )


@autodiff(inputs_require_grad=(0, 1, 2))
def attention(q, k, v, causal=False, scale=None):
    """q, k, v: (batch, heads, tokens, head dim) of one shape."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, N, D = q.shape
    if scale is None:
        scale = D**-0.5
    o = torch.empty_like(q)
    BLOCK_M, BLOCK_N = 64, 32
    attention_kernel[(triton.cdiv(N, BLOCK_M), B * H)](
        q, k, v, o,
        q.stride(0), q.stride(1), q.stride(2),
        H, N, D, scale,
        CAUSAL=causal,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return o


def reference(q, k, v, causal=False, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q @ k.transpose(-1, -2)
    if causal:
        N = q.shape[-2]
        s = s.masked_fill(torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1), -float("inf"))
    return torch.softmax(s, dim=-1) @ v


def flops(dims, mode):
    forward = 4 * dims["B"] * dims["H"] * dims["N"] ** 2 * dims["D"] / (2 if dims["causal"] else 1)
    return forward * {"fwd": 1.0, "bwd": 2.5}.get(mode, 3.5)


SWEEP = [
    {"B": 4, "H": 16, "N": 1024, "D": 64, "causal": True},
    {"B": 2, "H": 16, "N": 2048, "D": 128, "causal": True},
    {"B": 2, "H": 8, "N": 1000, "D": 64, "causal": False},
    {"B": 1, "H": 32, "N": 8192, "D": 128, "causal": True, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float16):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return (q, k, v), {"causal": dims["causal"]}
