"""Rotary embedding, interleaved or by halves, of padded or packed sequences, with offsets into the tables."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard, packed, prepare_chunk_indices


@triton.jit(do_not_specialize=["T"])
def rotary_embedding_kernel(
    x, cos, sin, y, cu_seqlens, chunk_indices, seq_offsets, T, B: tl.constexpr, H: tl.constexpr, D:
    tl.constexpr, R: tl.constexpr, TR: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    IS_SEQLEN_OFFSETS_TENSOR: tl.constexpr, IS_VARLEN: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE:
    tl.constexpr,
):  # fmt: skip
    i_t, i_b, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    if IS_VARLEN:
        i_n, i_t = (
            tl.load(chunk_indices + i_t * 2).to(tl.int32),
            tl.load(chunk_indices + i_t * 2 + 1).to(tl.int32),
        )
        bos, eos = tl.load(cu_seqlens + i_n), tl.load(cu_seqlens + i_n + 1)
        T = eos - bos
        x = x + bos * H * D + i_h * D
        y = y + bos * H * D + i_h * D
    else:
        i_n = i_b
        x = x + i_n * T * H * D + i_h * D
        y = y + i_n * T * H * D + i_h * D

    if i_t * BT >= T:
        return

    o_t = i_t * BT + tl.arange(0, BT)
    if not IS_SEQLEN_OFFSETS_TENSOR:
        o_cs = o_t + seq_offsets
    else:
        o_cs = o_t + tl.load(seq_offsets + i_n)
    m_t = (o_t >= 0) & (o_t < T) & (o_cs >= 0) & (o_cs < TR)

    if not INTERLEAVED:
        # x0 x1 ... xR-1 | xR ... x2R-1
        o_r = tl.arange(0, BD // 2)
        p_x = x + o_t[:, None] * H * D + o_r[None, :]
        p_cos = cos + (o_cs[:, None] * R + o_r[None, :])
        p_sin = sin + (o_cs[:, None] * R + o_r[None, :])
        mask = m_t[:, None] & (o_r < R)[None, :]

        b_cos = tl.load(p_cos, mask=mask, other=1.0).to(tl.float32)
        b_sin = tl.load(p_sin, mask=mask, other=0.0).to(tl.float32)
        b_x0 = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
        b_x1 = tl.load(p_x + R, mask=mask, other=0.0).to(tl.float32)
        if CONJUGATE:
            b_sin = -b_sin
        b_o0 = b_x0 * b_cos - b_x1 * b_sin
        b_o1 = b_x0 * b_sin + b_x1 * b_cos
        p_y = y + (o_t[:, None] * H * D + o_r[None, :])
        tl.store(p_y, b_o0, mask=mask)
        tl.store(p_y + R, b_o1, mask=mask)
    else:
        # neighbours swapped: x1 x0 x3 x2 ... takes a second load that coalesces
        o_d = tl.arange(0, BD)
        o_d_swap = o_d + ((o_d + 1) % 2) * 2 - 1  # 1, 0, 3, 2, ...
        o_d_repeat = tl.arange(0, BD) // 2
        p_x0 = x + o_t[:, None] * H * D + o_d[None, :]
        p_x1 = x + o_t[:, None] * H * D + o_d_swap[None, :]
        p_cos = cos + (o_cs[:, None] * R + o_d_repeat[None, :])
        p_sin = sin + (o_cs[:, None] * R + o_d_repeat[None, :])
        mask = m_t[:, None] & (o_d_repeat < R)[None, :]

        b_cos = tl.load(p_cos, mask=mask, other=1.0).to(tl.float32)
        b_sin = tl.load(p_sin, mask=mask, other=0.0).to(tl.float32)
        b_x0 = tl.load(p_x0, mask=mask, other=0.0).to(tl.float32)
        b_x1 = tl.load(p_x1, mask=mask, other=0.0).to(tl.float32)
        if CONJUGATE:
            b_sin = -b_sin
        b_o0 = b_x0 * b_cos
        b_o1 = b_x1 * b_sin
        b_y = tl.where(o_d[None, :] % 2 == 0, b_o0 - b_o1, b_o0 + b_o1)
        p_y = y + (o_t[:, None] * H * D + o_d[None, :])
        tl.store(p_y, b_y, mask=mask)


@autodiff(inputs_require_grad=(0,))
@input_guard
def rotary_embedding(
    x, cos, sin, interleaved=False, inplace=False, conjugate=False, seqlen_offsets=0, cu_seqlens=None
):
    is_varlen = cu_seqlens is not None
    B, T, H, D = x.shape
    N = B if not is_varlen else cu_seqlens.shape[0] - 1
    TR, R = cos.shape
    R2 = R * 2
    assert D <= 256, "Only support D <= 256"
    assert D >= R2, "the rotated dimensions are more than D"
    if isinstance(seqlen_offsets, torch.Tensor):
        assert seqlen_offsets.shape == (N,)
        seqlen_offsets = seqlen_offsets.contiguous()
    y = torch.empty_like(x) if not inplace else x
    if R2 < D and not inplace:
        y[..., R2:].copy_(x[..., R2:])

    BD = triton.next_power_of_2(R2)
    BT = min(128, triton.next_power_of_2(triton.cdiv(T, 4)))
    chunk_indices = prepare_chunk_indices(cu_seqlens, BT) if is_varlen else None
    NT = len(chunk_indices) if is_varlen else triton.cdiv(T, BT)

    def grid(meta):
        return NT, B, H

    rotary_embedding_kernel[grid](
        x, cos, sin, y, cu_seqlens, chunk_indices, seqlen_offsets,
        B=B, T=T, H=H, D=D, R=R, TR=TR, BT=BT, BD=BD,
        IS_SEQLEN_OFFSETS_TENSOR=isinstance(seqlen_offsets, torch.Tensor), IS_VARLEN=is_varlen,
        INTERLEAVED=interleaved, CONJUGATE=conjugate,
    )  # fmt: skip
    return y


SWEEP = [
    {"B": 2, "T": 20, "H": 2, "R": 8, "part": True, "interleaved": False, "packed": False, "shift": False},
    {"B": 1, "T": 33, "H": 2, "R": 8, "part": False, "interleaved": True, "packed": True, "shift": False},
    {"B": 2, "T": 9, "H": 1, "R": 4, "part": False, "interleaved": True, "packed": False, "shift": True},
    {"B": 1, "T": 60, "H": 2, "R": 16, "part": False, "interleaved": False, "packed": True, "shift": True},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, R = dims["T"], dims["R"]
    left = int(dims["part"] and R >= 8)  # elements of a head that are not rotated
    x = torch.randn(dims["B"], T, dims["H"], 2 * R + left, device=device, dtype=dtype)
    rows = T + 2 * dims["B"]
    angle = torch.arange(rows, device=device)[:, None] * 100.0 ** (-torch.arange(R, device=device) / R)
    cu = packed(T, device) if dims["packed"] and dims["B"] == 1 else None
    count = dims["B"] if cu is None else len(cu) - 1
    shift = torch.arange(count, device=device, dtype=torch.int32) % 2 if dims["shift"] else 1
    kwargs = {"interleaved": dims["interleaved"], "seqlen_offsets": shift, "cu_seqlens": cu}
    return (x, angle.cos().to(dtype), angle.sin().to(dtype)), kwargs
