"""Cross entropy with ignored labels, label smoothing, a z-loss and a softcap; online over the vocabulary."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import TRITON_3, is_hip

if TRITON_3:
    try:
        from triton.language.extra.libdevice import tanh
    except ModuleNotFoundError:
        from triton.language.extra.cuda.libdevice import tanh
else:
    from triton.language.math import tanh

MAX_FUSED_SIZE = 65536 // 2


@triton.jit
def cross_entropy_kernel(
    X_ptr, X_stride, Y_ptr, Y_stride, weight_ptr, loss_ptr, z_loss_ptr, loss_stride, n_cols, n_non_ignore,
    sum_non_ignore_weight, weight_sum, ignore_index, lse_square_scale: tl.constexpr, label_smoothing:
    tl.constexpr, reduction: tl.constexpr, softcap, RETURN_Z_LOSS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_SOFTCAPPING: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    program_id = tl.program_id(0).to(tl.int64)

    # the label of this row
    Y_ptr += program_id * Y_stride
    y = tl.load(Y_ptr)
    X_ptr += program_id * X_stride

    if y == ignore_index:
        return

    loss_ptr += program_id * loss_stride
    if RETURN_Z_LOSS:
        z_loss_ptr += program_id * loss_stride
    if HAS_WEIGHT:
        weight_y = tl.load(weight_ptr + y).cast(tl.float32)

    # maximum and sum of exponentials, online
    m = float("-inf")
    d = 0.0
    ori_X_y = tl.load(X_ptr + y).cast(tl.float32)
    if HAS_SOFTCAPPING:
        ori_X_y = softcap * tanh(ori_X_y / softcap)

    # sum(-eps * x_i), smoothed labels
    scaled_x_sum = 0.0
    eps = label_smoothing / n_cols

    for i in range(0, n_cols, BLOCK_SIZE):
        X_offsets = i + tl.arange(0, BLOCK_SIZE)
        X_block = tl.load(X_ptr + X_offsets, mask=X_offsets < n_cols, other=float("-inf")).cast(tl.float32)
        if HAS_SOFTCAPPING:
            X_block = softcap * tanh(X_block / softcap)
        block_max = tl.max(X_block)
        if label_smoothing > 0:
            if HAS_WEIGHT:
                weight_block = tl.load(weight_ptr + X_offsets, mask=X_offsets < n_cols)
                scaled_x_sum += tl.sum(tl.where(X_offsets < n_cols, -eps * X_block * weight_block, 0.0))
            else:
                scaled_x_sum += tl.sum(tl.where(X_offsets < n_cols, -eps * X_block, 0.0))
        m_new = tl.maximum(m, block_max)
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(X_block - m_new))
        m = m_new

    # log(sum(exp(x_i))) = m + log(d)
    lse = m + tl.log(d)

    loss = lse - ori_X_y
    if HAS_WEIGHT:
        loss = weight_y * loss

    if label_smoothing > 0:
        if HAS_WEIGHT:
            smooth_loss = scaled_x_sum + eps * lse * weight_sum
        else:
            smooth_loss = scaled_x_sum + label_smoothing * lse
        loss = loss * (1 - label_smoothing) + smooth_loss

    # keeps the log of the sum near zero
    z_loss = lse_square_scale * lse * lse
    if reduction == "mean":
        if HAS_WEIGHT:
            loss = loss / sum_non_ignore_weight
        else:
            loss = loss / n_non_ignore
        z_loss = z_loss / n_non_ignore
    loss += z_loss

    tl.store(loss_ptr, loss)
    if RETURN_Z_LOSS:
        tl.store(z_loss_ptr, z_loss)


@autodiff(inputs_require_grad=(0,))
def cross_entropy(
    _input,
    target,
    weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
):
    assert reduction in {"mean", "sum", "none"}, f"reduction {reduction}"
    BT, V = _input.shape
    n_rows = BT
    BLOCK_SIZE = min(MAX_FUSED_SIZE, triton.next_power_of_2(V))

    loss_1d = torch.zeros(n_rows, dtype=_input.dtype, device=_input.device)
    z_loss_1d = torch.zeros(n_rows, dtype=_input.dtype, device=_input.device) if return_z_loss else None

    target_mask = target != ignore_index
    n_non_ignore = target_mask.sum().item()
    sum_non_ignore_weight = n_non_ignore
    weight_sum = 0.0
    if weight is not None:
        assert weight.shape[0] == V, f"a weight of {weight.shape[0]} for {V} classes"
        sum_non_ignore_weight = (
            torch.gather(weight, dim=0, index=target.masked_select(target_mask)).sum().item()
        )
        weight_sum = weight.sum().item()
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
    if _input.stride(-1) != 1:
        _input = _input.contiguous()
    if target.stride(-1) != 1:
        target = target.contiguous()

    cross_entropy_kernel[(n_rows,)](
        X_ptr=_input,
        X_stride=_input.stride(-2),
        Y_ptr=target,
        Y_stride=target.stride(-1),
        weight_ptr=weight,
        loss_ptr=loss_1d,
        z_loss_ptr=z_loss_1d,
        loss_stride=loss_1d.stride(-1),
        n_cols=V,
        n_non_ignore=n_non_ignore,
        sum_non_ignore_weight=sum_non_ignore_weight,
        weight_sum=weight_sum,
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        RETURN_Z_LOSS=return_z_loss,
        HAS_WEIGHT=weight is not None,
        HAS_SOFTCAPPING=softcap is not None,
        BLOCK_SIZE=BLOCK_SIZE,
        num_warps=32 if not is_hip() else 16,
    )

    if reduction == "none":
        loss = loss_1d
        z_loss = z_loss_1d if return_z_loss else None
    else:
        loss = torch.sum(loss_1d)
        z_loss = torch.sum(z_loss_1d) if return_z_loss else None
    return loss, z_loss


SWEEP = [
    {"M": 7, "V": 50, "smooth": 0.1, "z": 1e-3, "cap": 0.0, "weight": False, "reduction": "mean"},
    {"M": 6, "V": 33, "smooth": 0.0, "z": 0.0, "cap": 0.0, "weight": False, "reduction": "sum"},
    {"M": 5, "V": 20, "smooth": 0.2, "z": 1e-2, "cap": 9.0, "weight": True, "reduction": "none"},
    {
        "M": 20, "V": 3000, "smooth": 0.1, "z": 1e-4, "cap": 30.0, "weight": False, "reduction": "mean",
        "required": False,
    },
]  # fmt: skip


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["V"], device=device, dtype=dtype)
    target = torch.randint(0, dims["V"], (dims["M"],), device=device)
    if dims["M"] > 2:
        target[1] = -100
    weight = torch.rand(dims["V"], device=device, dtype=dtype) + 0.5 if dims["weight"] else None
    return (x, target, weight), {
        "lse_square_scale": dims["z"],
        "label_smoothing": dims["smooth"],
        "reduction": dims["reduction"],
        "softcap": dims["cap"] or None,
        "return_z_loss": dims["z"] > 0,
    }
