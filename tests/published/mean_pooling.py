"""The mean of each chunk of a sequence, a head at a time; padded or packed."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard, packed, prepare_chunk_indices


@triton.heuristics({"IS_VARLEN": lambda args: args["cu_seqlens"] is not None})
@triton.autotune(
    configs=[triton.Config({"BD": BD}, num_warps=w) for BD in [16, 32] for w in [1, 2, 4]], key=["BT"]
)
@triton.jit(do_not_specialize=["T"])
def mean_pooling_fwd_kernel(
    x,
    o,
    cu_seqlens,
    chunk_indices,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    i_d, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    if IS_VARLEN:
        i_tg = i_t
        i_n = tl.load(chunk_indices + i_t * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_t * 2 + 1).to(tl.int32)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int32), tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        T = eos - bos
        NT = tl.cdiv(T, BT)
    else:
        NT = tl.cdiv(T, BT)
        i_tg = i_b * NT + i_t
        bos, eos = i_b * T, i_b * T + T

    p_x = tl.make_block_ptr(
        x + (bos * H + i_h) * D, (T, D), (H * D, 1), (i_t * BT, i_d * BD), (BT, BD), (1, 0)
    )
    p_o = tl.make_block_ptr(o + (i_tg * H + i_h) * D, (D,), (1,), (i_d * BD,), (BD,), (0,))
    # [BT, BD]
    b_x = tl.load(p_x, boundary_check=(0, 1)).to(tl.float32)
    # [BD]
    b_o = tl.sum(b_x, axis=0) / min(BT, T - i_t * BT)
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0,))


@autodiff(inputs_require_grad=(0,))
@input_guard
def mean_pooling(x, chunk_size, cu_seqlens=None):
    B, T, H, D = x.shape
    BT = chunk_size
    chunk_indices = prepare_chunk_indices(cu_seqlens, BT) if cu_seqlens is not None else None
    NT = triton.cdiv(T, BT) if cu_seqlens is None else len(chunk_indices)
    o = x.new_empty(B, NT, H, D)

    def grid(meta):
        return (triton.cdiv(D, meta["BD"]), NT, B * H)

    mean_pooling_fwd_kernel[grid](x, o, cu_seqlens, chunk_indices, T=T, H=H, D=D, BT=BT)
    return o


SWEEP = [
    {"B": 2, "T": 37, "H": 2, "D": 24, "packed": False},
    {"B": 1, "T": 45, "H": 2, "D": 16, "packed": True},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["H"], dims["D"], device=device, dtype=dtype)
    return x, 16, packed(dims["T"], device) if dims["packed"] and dims["B"] == 1 else None
