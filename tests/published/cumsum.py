"""Cumulative sums within chunks, forwards or from the end, of scalars or vectors a head; varlen too."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard, packed, prepare_chunk_indices

BS_LIST = [16, 32]


@triton.heuristics(
    {
        "HAS_SCALE": lambda args: args["scale"] is not None,
        "IS_VARLEN": lambda args: args["cu_seqlens"] is not None,
    }
)
@triton.autotune(
    configs=[triton.Config({}, num_warps=num_warps) for num_warps in [1, 2, 4, 8]],
    key=["B", "H", "BT", "IS_VARLEN", "REVERSE"],
)
@triton.jit(do_not_specialize=["T"])
def chunk_local_cumsum_scalar_kernel(
    s,
    o,
    scale,
    cu_seqlens,
    chunk_indices,
    T,
    B: tl.constexpr,
    H: tl.constexpr,
    BT: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    HEAD_FIRST: tl.constexpr,
):
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_t * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_t * 2 + 1).to(tl.int32)
        bos = tl.load(cu_seqlens + i_n).to(tl.int32)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        T = eos - bos
    else:
        bos, eos = i_b * T, i_b * T + T

    if HEAD_FIRST:
        p_s = tl.make_block_ptr(s + bos * H + i_h * T, (T,), (1,), (i_t * BT,), (BT,), (0,))
        p_o = tl.make_block_ptr(o + bos * H + i_h * T, (T,), (1,), (i_t * BT,), (BT,), (0,))
    else:
        p_s = tl.make_block_ptr(s + bos * H + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
        p_o = tl.make_block_ptr(o + bos * H + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
    b_s = tl.load(p_s, boundary_check=(0,)).to(tl.float32)
    b_o = tl.cumsum(b_s, axis=0)
    if REVERSE:
        b_z = tl.sum(b_s, axis=0)
        b_o = -b_o + b_z[None] + b_s
    if HAS_SCALE:
        b_o *= scale
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0,))


@triton.heuristics(
    {
        "HAS_SCALE": lambda args: args["scale"] is not None,
        "IS_VARLEN": lambda args: args["cu_seqlens"] is not None,
    }
)
@triton.autotune(
    configs=[triton.Config({"BS": BS}, num_warps=w) for BS in BS_LIST for w in [2, 4, 8]],
    key=["B", "H", "S", "BT", "IS_VARLEN", "REVERSE"],
)
@triton.jit(do_not_specialize=["T"])
def chunk_local_cumsum_vector_kernel(
    s,
    o,
    scale,
    cu_seqlens,
    chunk_indices,
    T,
    B: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    i_s, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_t * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_t * 2 + 1).to(tl.int32)
        bos = tl.load(cu_seqlens + i_n).to(tl.int32)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        T = eos - bos
    else:
        bos, eos = i_b * T, i_b * T + T

    p_s = tl.make_block_ptr(
        s + (bos * H + i_h) * S, (T, S), (H * S, 1), (i_t * BT, i_s * BS), (BT, BS), (1, 0)
    )
    p_o = tl.make_block_ptr(
        o + (bos * H + i_h) * S, (T, S), (H * S, 1), (i_t * BT, i_s * BS), (BT, BS), (1, 0)
    )
    b_s = tl.load(p_s, boundary_check=(0, 1)).to(tl.float32)
    if REVERSE:
        b_o = tl.cumsum(b_s, axis=0, reverse=True)
    else:
        b_o = tl.cumsum(b_s, axis=0)
    if HAS_SCALE:
        b_o *= scale
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0, 1))


def chunk_local_cumsum_scalar(g, chunk_size, reverse, scale, cu_seqlens, head_first, output_dtype):
    B, H, T = g.shape if head_first else (g.shape[0], g.shape[2], g.shape[1])
    assert chunk_size == 2 ** (chunk_size.bit_length() - 1), "chunk_size must be a power of 2"
    BT = chunk_size
    chunk_indices = prepare_chunk_indices(cu_seqlens, BT) if cu_seqlens is not None else None
    NT = triton.cdiv(T, BT) if cu_seqlens is None else len(chunk_indices)
    g_org, g = g, torch.empty_like(g, dtype=output_dtype or g.dtype)
    grid = (NT, B * H)
    chunk_local_cumsum_scalar_kernel[grid](
        s=g_org, o=g, scale=scale, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        T=T, B=B, H=H, BT=BT, HEAD_FIRST=head_first, REVERSE=reverse,
    )  # fmt: skip
    return g


def chunk_local_cumsum_vector(g, chunk_size, reverse, scale, cu_seqlens, output_dtype):
    B, T, H, S = g.shape
    BT = chunk_size
    chunk_indices = prepare_chunk_indices(cu_seqlens, BT) if cu_seqlens is not None else None
    NT = triton.cdiv(T, BT) if cu_seqlens is None else len(chunk_indices)
    g_org, g = g, torch.empty_like(g, dtype=output_dtype or g.dtype)

    def grid(meta):
        return (triton.cdiv(meta["S"], meta["BS"]), NT, B * H)

    chunk_local_cumsum_vector_kernel[grid](
        s=g_org, o=g, scale=scale, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        T=T, B=B, H=H, S=S, BT=BT, REVERSE=reverse,
    )  # fmt: skip
    return g


@autodiff(inputs_require_grad=(0,))
@input_guard
def chunk_local_cumsum(
    g, chunk_size, reverse=False, scale=None, cu_seqlens=None, head_first=False, output_dtype=torch.float
):
    if cu_seqlens is not None:
        assert g.shape[0] == 1, "Only batch size 1 is supported when cu_seqlens are provided"
    if len(g.shape) == 3:
        return chunk_local_cumsum_scalar(g, chunk_size, reverse, scale, cu_seqlens, head_first, output_dtype)
    if len(g.shape) == 4:
        return chunk_local_cumsum_vector(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)
    raise ValueError(f"Unsupported input shape {g.shape}, neither (B, T, H) nor (B, T, H, D)")


SWEEP = [
    {"B": 2, "T": 40, "H": 3, "S": 0, "reverse": False, "packed": False, "head_first": True},
    {"B": 1, "T": 45, "H": 2, "S": 20, "reverse": True, "packed": True, "head_first": False},
    {"B": 1, "T": 50, "H": 2, "S": 0, "reverse": True, "packed": True, "head_first": False},
    {"B": 2, "T": 33, "H": 2, "S": 40, "reverse": False, "packed": False, "head_first": False},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H = dims["B"], dims["T"], dims["H"]
    shape = (B, H, T) if dims["head_first"] and not dims["S"] else (B, T, H)
    g = torch.randn(*shape, *([dims["S"]] if dims["S"] else []), device=device, dtype=dtype)
    cu = packed(T, device) if dims["packed"] and B == 1 else None
    head_first = dims["head_first"] and not dims["S"]
    scale = 0.5 if dims["reverse"] else None
    return (g, 16), {"reverse": dims["reverse"], "scale": scale, "cu_seqlens": cu, "head_first": head_first}
