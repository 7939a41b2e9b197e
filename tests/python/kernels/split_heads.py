"""Queries, keys and values out of one projection, with a bias that may be left out."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None})
@triton.jit
def qkv_kernel(
    qkv, bias, q, k, v, S, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HAS_BIAS: tl.constexpr, scale
):
    i_s, i_h = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, BD)
    m = o < D
    base = qkv + i_s * 3 * H * D + i_h * D + o
    b_q = tl.load(base, mask=m, other=0.0).to(tl.float32)
    b_k = tl.load(base + H * D, mask=m, other=0.0).to(tl.float32)
    b_v = tl.load(base + 2 * H * D, mask=m, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_q += tl.load(bias + i_h * D + o, mask=m, other=0.0)
        b_k += tl.load(bias + H * D + i_h * D + o, mask=m, other=0.0)
        b_v += tl.load(bias + 2 * H * D + i_h * D + o, mask=m, other=0.0)
    b_q *= scale
    at = (i_s * H + i_h) * D + o
    tl.store(q + at, b_q, mask=m)
    tl.store(k + at, b_k, mask=m)
    tl.store(v + at, b_v, mask=m)


@autodiff(inputs_require_grad=(0, 1))
def split_qkv(qkv, bias=None, heads=2, scale=None):
    S, W = qkv.shape
    D = W // 3 // heads
    q, k, v = (qkv.new_empty(S, heads, D) for _ in range(3))
    qkv_kernel[(S, heads)](qkv, bias, q, k, v, S, heads, D, triton.next_power_of_2(D), scale=scale or D**-0.5)
    return q, k, v


SWEEP = [{"S": 5, "D": 12, "bias": True}, {"S": 7, "D": 16, "bias": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    qkv = torch.randn(dims["S"], 6 * dims["D"], device=device, dtype=dtype)
    bias = torch.randn(6 * dims["D"], device=device, dtype=dtype) if dims["bias"] else None
    return qkv, bias
