"""Rotary embedding of q and k in one packed projection, the queries scaled as well; values pass as they are.

qkv is (batch, tokens, heads of q + 2 heads of k, D). Pairs of lanes are halves apart.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard


@triton.autotune(
    configs=[triton.Config({"BH": BH}, num_warps=num_warps) for BH in [1, 4] for num_warps in [2, 4]],
    key=["H", "R"],
)
@triton.heuristics({"HAS_OFFSETS": lambda args: args["offsets"] is not None})
@triton.jit
def rotary_qk_fwd_kernel(
    qkv, out, cos, sin, offsets, scale, T, HQ, H,
    s_b, s_t, s_h, o_b, o_t, o_h,
    R: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_h_ = i_h * BH + tl.arange(0, BH)
    o_r = tl.arange(0, BR)
    pos = i_t
    if HAS_OFFSETS:
        pos += tl.load(offsets + i_b)
    m_r = o_r < R
    b_cos = tl.load(cos + pos * R + o_r, mask=m_r, other=1.0).to(tl.float32)
    b_sin = tl.load(sin + pos * R + o_r, mask=m_r, other=0.0).to(tl.float32)

    mask = (o_h_ < H)[:, None] & m_r[None, :]
    p_x = qkv + i_b * s_b + i_t * s_t + o_h_[:, None] * s_h + o_r[None, :]
    p_o = out + i_b * o_b + i_t * o_t + o_h_[:, None] * o_h + o_r[None, :]
    b_0 = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_1 = tl.load(p_x + R, mask=mask, other=0.0).to(tl.float32)
    b_s = tl.where(o_h_ < HQ, scale, 1.0)[:, None]
    tl.store(p_o, ((b_0 * b_cos[None, :] - b_1 * b_sin[None, :]) * b_s).to(p_o.dtype.element_ty), mask=mask)
    tl.store(
        p_o + R, ((b_0 * b_sin[None, :] + b_1 * b_cos[None, :]) * b_s).to(p_o.dtype.element_ty), mask=mask
    )


def _rotate(qkv, cos, sin, num_q_heads, num_k_heads, scale, seqlen_offsets):
    B, T, _HH, D = qkv.shape
    R = cos.shape[-1]
    assert 2 * R <= D, "rotary_dim must not exceed the head's"
    H = num_q_heads + num_k_heads
    out = qkv.clone()  # values, and what is beyond the rotated lanes
    grid = lambda meta: (triton.cdiv(H, meta["BH"]), T, B)
    rotary_qk_fwd_kernel[grid](
        qkv, out, cos, sin, seqlen_offsets, scale, T, num_q_heads, H,
        qkv.stride(0), qkv.stride(1), qkv.stride(2), out.stride(0), out.stride(1), out.stride(2),
        R=R, BR=triton.next_power_of_2(R),
    )  # fmt: skip
    return out


@autodiff(inputs_require_grad=(0,))
@input_guard
def apply_rotary_qk(qkv, cos, sin, num_q_heads, scale=None, seqlen_offsets=None):
    num_k_heads = (qkv.shape[2] - num_q_heads) // 2
    if scale is None:
        scale = qkv.shape[-1] ** -0.5
    return _rotate(qkv, cos, sin, num_q_heads, num_k_heads, scale, seqlen_offsets)


SWEEP = [
    {"B": 2, "T": 6, "HQ": 4, "HK": 2, "D": 32, "R": 16, "offsets": False},
    {"B": 2, "T": 5, "HQ": 3, "HK": 1, "D": 32, "R": 8, "offsets": True},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, R = dims["B"], dims["T"], dims["R"]
    qkv = torch.randn(B, T, dims["HQ"] + 2 * dims["HK"], dims["D"], device=device, dtype=dtype)
    angle = torch.outer(
        torch.arange(T + 8, device=device).float(), 100.0 ** -torch.linspace(0, 1, R, device=device)
    )
    offsets = torch.arange(B, device=device, dtype=torch.int32) if dims["offsets"] else None
    return (qkv, angle.cos().to(dtype), angle.sin().to(dtype), dims["HQ"]), {"seqlen_offsets": offsets}
