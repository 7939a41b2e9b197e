"""Total variation distance of two distributions, half the sum of |p - q|, with ignored labels."""

from typing import Literal

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import ensure_contiguous

MAX_FUSED_SIZE = 65536 // 4
REDUCTION_LITERAL = Literal["none", "sum", "mean", "batchmean"]

_REDUCTION_MODE_NONE: tl.constexpr = tl.constexpr(0)
_REDUCTION_MODE_SUM: tl.constexpr = tl.constexpr(1)
_REDUCTION_MODE_MEAN: tl.constexpr = tl.constexpr(2)
_REDUCTION_MODE_BATCHMEAN: tl.constexpr = tl.constexpr(3)
_str_to_reduction_mode = {
    "none": _REDUCTION_MODE_NONE.value,
    "sum": _REDUCTION_MODE_SUM.value,
    "mean": _REDUCTION_MODE_MEAN.value,
    "batchmean": _REDUCTION_MODE_BATCHMEAN.value,
}


def get_num_warps(BLOCK_SIZE):
    num_warps = 4
    if BLOCK_SIZE >= 32768:
        num_warps = 32
    elif BLOCK_SIZE >= 8192:
        num_warps = 16
    elif BLOCK_SIZE >= 2048:
        num_warps = 8
    return num_warps


@triton.jit
def _tv_distance_kernel(
    p_ptr,
    p_stride,
    q_ptr,
    q_stride,
    loss_ptr,
    loss_stride,
    label_ptr,
    ignore_index: tl.constexpr,
    n_cols,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    reduction: tl.constexpr = _REDUCTION_MODE_BATCHMEAN,
):
    pid = tl.program_id(0).to(tl.int64)
    p_ptr += pid * p_stride
    q_ptr += pid * q_stride
    loss_ptr += pid * loss_stride
    label_ptr += pid

    base_offsets = tl.arange(0, BLOCK_SIZE)
    if HAS_LABEL:
        label = tl.load(label_ptr)
        if label == ignore_index:
            return

    loss_sum = 0.0
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + base_offsets
        mask = offsets < n_cols
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0)
        q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
        tv_loss = 0.5 * tl.abs(p - q)
        if reduction == _REDUCTION_MODE_NONE:
            tl.store(loss_ptr + offsets, tv_loss, mask=mask)
        else:
            loss_sum += tl.sum(tv_loss, axis=0)

    if reduction != _REDUCTION_MODE_NONE:
        tl.store(loss_ptr, loss_sum * scale)


@autodiff(inputs_require_grad=(0,))
@ensure_contiguous
def tv_distance(p, q, shift_labels=None, reduction: REDUCTION_LITERAL = "batchmean", ignore_index=-100):
    BT, V = p.shape
    BLOCK_SIZE = min(MAX_FUSED_SIZE, triton.next_power_of_2(V))
    grid = (BT,)
    mode = _str_to_reduction_mode[reduction]
    has_label = shift_labels is not None
    n_non_ignore = (shift_labels != ignore_index).sum().item() if has_label else BT
    out_size = (BT, V) if mode == _REDUCTION_MODE_NONE.value else (BT,)
    output_tensor = torch.zeros(out_size, device=p.device, dtype=torch.float32)
    scale = {"batchmean": 1.0 / max(n_non_ignore, 1), "mean": 1.0 / (max(n_non_ignore, 1) * V)}
    _tv_distance_kernel[grid](
        p, p.stride(0), q, q.stride(0), output_tensor, output_tensor.stride(0),
        shift_labels if has_label else torch.empty(1, device=p.device), ignore_index, V,
        scale.get(reduction, 1.0), BLOCK_SIZE=BLOCK_SIZE, HAS_LABEL=has_label,
        num_warps=get_num_warps(BLOCK_SIZE), reduction=mode,
    )  # fmt: skip
    return output_tensor if reduction == "none" else output_tensor.sum()


SWEEP = [
    {"M": 6, "V": 40, "reduction": "batchmean", "label": True},
    {"M": 3, "V": 65, "reduction": "none", "label": False},
    {"M": 4, "V": 17000, "reduction": "mean", "label": False, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    p = torch.randn(dims["M"], dims["V"], device=device, dtype=dtype).softmax(-1)
    q = torch.randn(dims["M"], dims["V"], device=device, dtype=dtype).softmax(-1)
    label = torch.arange(dims["M"], device=device)
    label[1::3] = -100
    return (p, q, label if dims["label"] else None), {"reduction": dims["reduction"]}
