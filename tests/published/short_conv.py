"""Short causal convolution, a tap a step back, with bias, residual, activation and packed sequences."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard, packed, prepare_chunk_indices


@triton.heuristics(
    {
        "HAS_WEIGHT": lambda args: args["weight"] is not None,
        "HAS_BIAS": lambda args: args["bias"] is not None,
        "HAS_RESIDUAL": lambda args: args["residual"] is not None,
        "IS_VARLEN": lambda args: args["cu_seqlens"] is not None,
    }
)
@triton.jit
def causal_conv1d_fwd_kernel(
    x,
    y,
    weight,
    bias,
    residual,
    cu_seqlens,
    chunk_indices,
    B,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    i_d, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_t * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_t * 2 + 1).to(tl.int32)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        T = eos - bos
    else:
        bos, eos = (i_b * T).to(tl.int64), (i_b * T + T).to(tl.int64)

    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_y = tl.zeros((BT, BD), dtype=tl.float32)
    for i_w in tl.static_range(-W + 1, 1):
        p_yi = tl.make_block_ptr(x + bos * D, (T, D), (D, 1), (i_t * BT + i_w, i_d * BD), (BT, BD), (1, 0))
        # [BT, BD]
        b_yi = tl.load(p_yi, boundary_check=(0, 1)).to(tl.float32)
        if HAS_WEIGHT:
            b_yi *= tl.load(weight + o_d * W + (i_w + W - 1), mask=m_d, other=0.0).to(tl.float32)
        b_y += b_yi

    if HAS_BIAS:
        b_y += tl.load(bias + o_d, mask=m_d).to(tl.float32)
    if ACTIVATION == "swish" or ACTIVATION == "silu":
        b_y = b_y * tl.sigmoid(b_y)
    if HAS_RESIDUAL:
        p_residual = tl.make_block_ptr(
            residual + bos * D, (T, D), (D, 1), (i_t * BT, i_d * BD), (BT, BD), (1, 0)
        )
        b_y += tl.load(p_residual, boundary_check=(0, 1))
    p_y = tl.make_block_ptr(y + bos * D, (T, D), (D, 1), (i_t * BT, i_d * BD), (BT, BD), (1, 0))
    tl.store(p_y, tl.cast(b_y, p_y.dtype.element_ty), boundary_check=(0, 1))


@autodiff(inputs_require_grad=(0, 1, 2, 3))
@input_guard
def causal_conv1d(x, weight=None, bias=None, residual=None, activation=None, cu_seqlens=None):
    B, T, D = x.shape
    W = weight.shape[1]
    BT, BD = 16, 16
    chunk_indices = prepare_chunk_indices(cu_seqlens, BT) if cu_seqlens is not None else None
    NT = len(chunk_indices) if cu_seqlens is not None else triton.cdiv(T, BT)
    y = torch.empty_like(x)

    def grid(meta):
        return (triton.cdiv(D, meta["BD"]), NT, B)

    causal_conv1d_fwd_kernel[grid](
        x=x, y=y, weight=weight, bias=bias, residual=residual, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, B=B, T=T, D=D, W=W, BT=BT, BD=BD, ACTIVATION=activation,
    )  # fmt: skip
    return y


SWEEP = [
    {"B": 2, "T": 21, "D": 20, "W": 4, "extras": True, "packed": False},
    {"B": 1, "T": 37, "D": 33, "W": 3, "extras": True, "packed": True},
    {"B": 1, "T": 18, "D": 16, "W": 4, "extras": False, "packed": False},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    x = torch.randn(B, T, D, device=device, dtype=dtype)
    weight = torch.randn(D, dims["W"], device=device, dtype=dtype)
    bias = torch.randn(D, device=device, dtype=dtype) if dims["extras"] else None
    residual = torch.randn(B, T, D, device=device, dtype=dtype) if dims["extras"] else None
    cu = packed(T, device) if dims["packed"] and B == 1 else None
    return (x, weight, bias, residual), {"activation": "silu" if dims["extras"] else None, "cu_seqlens": cu}
