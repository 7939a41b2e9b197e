"""Generalised Jensen-Shannon divergence of log-probabilities; beta 0 and 1 are the two KL divergences."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import ensure_contiguous

MAX_FUSED_SIZE = 4096


@triton.jit
def _jsd_kernel(
    X_ptr,  # log Q
    X_stride,
    Y_ptr,  # log P
    Y_stride,
    loss_ptr,
    loss_stride,
    label_ptr,
    beta: tl.constexpr,
    n_non_ignore: int,
    ignore_index: tl.constexpr,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    HAS_LABEL: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    X_ptr += pid * X_stride
    Y_ptr += pid * Y_stride
    loss_ptr += pid * loss_stride
    label_ptr += pid

    if HAS_LABEL:
        label = tl.load(label_ptr)
        if label == ignore_index:
            return

    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        mask = offsets < n_cols
        X = tl.load(X_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        Y = tl.load(Y_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)

        if beta == 0.0:  # forward KL: P (log P - log Q)
            Y_max = tl.max(Y, axis=0)
            Y_shifted = Y - Y_max
            Y_prob = tl.exp(Y_shifted) * tl.exp(Y_max)
            loss = Y_prob * (Y - X)
        elif beta == 1.0:  # reverse KL: Q (log Q - log P)
            X_max = tl.max(X, axis=0)
            X_shifted = X - X_max
            X_prob = tl.exp(X_shifted) * tl.exp(X_max)
            loss = X_prob * (X - Y)
        else:
            max_val = tl.maximum(tl.max(X, axis=0), tl.max(Y, axis=0))
            exp_max = tl.exp(max_val)
            Q = tl.exp(X - max_val) * exp_max
            P = tl.exp(Y - max_val) * exp_max
            beta_P = beta * P
            one_minus_beta_Q = (1 - beta) * Q
            M = beta_P + one_minus_beta_Q
            log_M = tl.log(M)
            loss = beta_P * Y + one_minus_beta_Q * X - M * log_M

        scale = 1.0 / n_non_ignore
        loss = loss * scale
        tl.store(loss_ptr + offsets, loss, mask=mask)


@autodiff(inputs_require_grad=(0,))
@ensure_contiguous
def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    has_label = shift_labels is not None
    BT, V = _input.shape
    BLOCK_SIZE = min(MAX_FUSED_SIZE, triton.next_power_of_2(V))
    loss = torch.zeros(_input.shape, dtype=torch.float32, device=_input.device)
    n_non_ignore = (shift_labels != ignore_index).sum().item() if has_label else BT
    if n_non_ignore == 0:
        return torch.zeros((), dtype=_input.dtype, device=_input.device)
    _jsd_kernel[(BT,)](
        X_ptr=_input,
        X_stride=_input.stride(-2),
        Y_ptr=target,
        Y_stride=target.stride(-2),
        loss_ptr=loss,
        loss_stride=loss.stride(-2),
        label_ptr=shift_labels if has_label else torch.empty(1, device=_input.device),
        beta=beta,
        n_non_ignore=n_non_ignore,
        ignore_index=ignore_index,
        n_cols=V,
        BLOCK_SIZE=BLOCK_SIZE,
        HAS_LABEL=has_label,
    )
    return torch.sum(loss).to(_input.dtype)


SWEEP = [
    {"M": 6, "V": 40, "beta": 0.5, "label": True},
    {"M": 3, "V": 65, "beta": 0.0, "label": False},
    {"M": 3, "V": 30, "beta": 1.0, "label": True},
    {"M": 4, "V": 5000, "beta": 0.1, "label": False, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["V"], device=device, dtype=dtype).log_softmax(-1)
    y = torch.randn(dims["M"], dims["V"], device=device, dtype=dtype).log_softmax(-1)
    label = torch.arange(dims["M"], device=device)
    label[1::3] = -100
    return (x, y, label if dims["label"] else None), {"beta": dims["beta"]}
