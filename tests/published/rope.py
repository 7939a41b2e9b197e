"""Rotary embedding of q and k in place, the two halves of a head rotated; one program a token."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def _triton_rope(
    q_ptr,
    q_row_stride,
    k_ptr,
    k_row_stride,
    cos,
    cos_row_stride,
    sin,
    sin_row_stride,
    sl,
    bs: tl.constexpr,
    cos_bs: tl.constexpr,
    n_qh: tl.constexpr,
    n_kh: tl.constexpr,
    hd: tl.constexpr,
    pad_n_qh: tl.constexpr,
    pad_n_kh: tl.constexpr,
    pad_hd: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # q (bs, sl, n_qh, hd), k (bs, sl, n_kh, hd), cos and sin (1 or bs, sl, hd)
    pid = tl.program_id(0).to(tl.int64)

    q_ptr = q_ptr + pid * q_row_stride
    k_ptr = k_ptr + pid * k_row_stride

    batch_idx = pid // sl
    cos_row_idx = pid % sl
    cos = cos + tl.where(
        cos_bs == 1,
        cos_row_idx * cos_row_stride,
        batch_idx * (sl * cos_row_stride) + cos_row_idx * cos_row_stride,
    )
    sin = sin + tl.where(
        cos_bs == 1,
        cos_row_idx * sin_row_stride,
        batch_idx * (sl * sin_row_stride) + cos_row_idx * sin_row_stride,
    )

    cos_offsets = tl.arange(0, pad_hd // 2)
    cos_mask = cos_offsets < hd // 2
    cos_row = tl.load(cos + cos_offsets, mask=cos_mask, other=0)
    sin_row = tl.load(sin + cos_offsets, mask=cos_mask, other=0)

    # left half
    first_half_q_offsets = tl.arange(0, pad_n_qh)[:, None] * hd + tl.arange(0, pad_hd // 2)[None, :]
    first_half_k_offsets = tl.arange(0, pad_n_kh)[:, None] * hd + tl.arange(0, pad_hd // 2)[None, :]
    first_q_mask = (tl.arange(0, pad_n_qh)[:, None] < n_qh) & (tl.arange(0, pad_hd // 2)[None, :] < hd // 2)
    first_k_mask = (tl.arange(0, pad_n_kh)[:, None] < n_kh) & (tl.arange(0, pad_hd // 2)[None, :] < hd // 2)
    q_tile_1 = tl.load(q_ptr + first_half_q_offsets, mask=first_q_mask, other=0).to(sin_row.dtype)
    k_tile_1 = tl.load(k_ptr + first_half_k_offsets, mask=first_k_mask, other=0).to(sin_row.dtype)

    # right half
    second_half_q_offsets = first_half_q_offsets + (hd // 2)
    second_half_k_offsets = first_half_k_offsets + (hd // 2)
    second_q_mask = first_q_mask
    second_k_mask = first_k_mask
    q_tile_2 = tl.load(q_ptr + second_half_q_offsets, mask=second_q_mask, other=0).to(sin_row.dtype)
    k_tile_2 = tl.load(k_ptr + second_half_k_offsets, mask=second_k_mask, other=0).to(sin_row.dtype)

    # [x1, x2] cos + [-x2, x1] sin
    new_q_tile_1 = q_tile_1 * cos_row - q_tile_2 * sin_row
    tl.store(q_ptr + first_half_q_offsets, new_q_tile_1, mask=first_q_mask)
    new_q_tile_2 = q_tile_2 * cos_row + q_tile_1 * sin_row
    tl.store(q_ptr + second_half_q_offsets, new_q_tile_2, mask=second_q_mask)

    new_k_tile_1 = k_tile_1 * cos_row - k_tile_2 * sin_row
    tl.store(k_ptr + first_half_k_offsets, new_k_tile_1, mask=first_k_mask)
    new_k_tile_2 = k_tile_2 * cos_row + k_tile_1 * sin_row
    tl.store(k_ptr + second_half_k_offsets, new_k_tile_2, mask=second_k_mask)


def rope_forward(q, k, cos, sin):
    # (bs, heads, sl, hd) to (bs, sl, heads, hd), and back
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    batch_size, seq_len, n_q_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    pad_hd = triton.next_power_of_2(head_dim)
    pad_n_q_head = triton.next_power_of_2(n_q_head)
    pad_n_kv_head = triton.next_power_of_2(n_kv_head)
    BLOCK_SIZE = max(pad_n_q_head, pad_n_kv_head)
    n_row = batch_size * seq_len

    q = q.contiguous()
    k = k.contiguous()
    cos = cos.contiguous()
    sin = sin.contiguous()
    cos_batch_size = cos.shape[0]
    _triton_rope[(n_row,)](
        q, q.stride(1), k, k.stride(1), cos, cos.stride(-2), sin, sin.stride(-2), seq_len,
        batch_size, cos_batch_size, n_q_head, n_kv_head, head_dim,
        pad_n_q_head, pad_n_kv_head, pad_hd, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


@autodiff(inputs_require_grad=(0, 1))
def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    q, k, _, _ = rope_forward(q, k, cos, sin)
    return q, k


def reference(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    half = q.shape[-1] // 2
    c, s = cos[:, None], sin[:, None]

    def turned(x):
        return x * c + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * s

    return turned(q), turned(k)


SWEEP = [
    {"B": 2, "HQ": 4, "HK": 2, "T": 7, "D": 16, "tables": False},
    {"B": 2, "HQ": 6, "HK": 3, "T": 5, "D": 24, "tables": True},
    {"B": 2, "HQ": 8, "HK": 4, "T": 32, "D": 64, "tables": False, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    D, T = 2 * max(1, dims["D"] // 2), dims["T"]
    q = torch.randn(dims["B"], dims["HQ"], T, D, device=device, dtype=dtype)
    k = torch.randn(dims["B"], dims["HK"], T, D, device=device, dtype=dtype)
    rows = dims["B"] if dims["tables"] else 1
    frequency = 10000.0 ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    at = torch.arange(T, device=device)[None] + 3 * torch.arange(rows, device=device)[:, None]
    angle = at[..., None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)
