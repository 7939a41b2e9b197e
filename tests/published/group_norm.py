"""Group norm: a program a (sample, group), the group's elements in blocks, then channel by channel."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import ensure_contiguous

try:
    from triton.language.extra.libdevice import rsqrt
except ModuleNotFoundError:
    from triton.language.extra.cuda.libdevice import rsqrt

MAX_FUSED_SIZE = 65536


@triton.jit
def _group_norm_forward_kernel(
    Y_ptr,  # (samples, groups, hidden)
    Y_row_stride,
    Y_col_stride,
    X_ptr,  # (samples, groups, hidden)
    X_row_stride,
    X_col_stride,
    Mean_ptr,  # (samples, groups)
    Mean_row_stride,
    Mean_col_stride,
    RSTD_ptr,  # (samples, groups)
    RSTD_row_stride,
    RSTD_col_stride,
    hidden_size,  # elements of a group
    channels_per_group,
    W_ptr,
    B_ptr,
    eps,
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0)
    group_idx = tl.program_id(1)

    X_ptr += batch_idx * X_row_stride + group_idx * X_col_stride
    Y_ptr += batch_idx * Y_row_stride + group_idx * Y_col_stride

    block_range = tl.arange(0, BLOCK_SIZE)

    # mean and variance in one pass
    s = 0.0
    squared_sum = 0.0
    for i in tl.range(0, hidden_size, BLOCK_SIZE):
        hidden_size_offsets = i + block_range
        mask = hidden_size_offsets < hidden_size
        X = tl.load(X_ptr + hidden_size_offsets, mask=mask, other=0.0)
        s += tl.sum(X)
        squared_sum += tl.sum(X * X)

    m = s / hidden_size
    variance = (squared_sum / hidden_size) - (m * m)
    rstd = rsqrt(variance + eps)

    # normalise, a channel at a time
    hidden_size_per_channel = hidden_size // channels_per_group
    for channel_idx in tl.range(group_idx * channels_per_group, (group_idx + 1) * channels_per_group):
        W = tl.load(W_ptr + channel_idx)
        B = tl.load(B_ptr + channel_idx)
        for i in tl.range(0, hidden_size_per_channel, BLOCK_SIZE):
            hidden_size_offsets = i + block_range
            mask = hidden_size_offsets < hidden_size_per_channel
            X = tl.load(X_ptr + hidden_size_offsets, mask=mask, other=m)
            Y = (X - m) * rstd * W + B
            tl.store(Y_ptr + hidden_size_offsets, Y, mask=mask)
        X_ptr += hidden_size_per_channel
        Y_ptr += hidden_size_per_channel

    tl.store(Mean_ptr + batch_idx * Mean_row_stride + group_idx * Mean_col_stride, m)
    tl.store(RSTD_ptr + batch_idx * RSTD_row_stride + group_idx * RSTD_col_stride, rstd)


@autodiff(inputs_require_grad=(0, 3, 4))
@ensure_contiguous
def group_norm(X, num_channels, num_groups, W, B, eps=1e-6):
    shape = X.shape
    batch_size = shape[0]
    channels_per_group = num_channels // num_groups
    X = X.view(batch_size, num_groups, -1).contiguous()
    hidden_size = X.shape[-1]
    BLOCK_SIZE = min(MAX_FUSED_SIZE, triton.next_power_of_2(hidden_size))
    Y = torch.empty((batch_size, num_groups, hidden_size), dtype=X.dtype, device=X.device)
    Mean = torch.zeros((batch_size, num_groups), dtype=X.dtype, device=X.device)
    RSTD = torch.zeros((batch_size, num_groups), dtype=X.dtype, device=X.device)
    _group_norm_forward_kernel[(batch_size, num_groups)](
        Y, Y.stride(0), Y.stride(1), X, X.stride(0), X.stride(1),
        Mean, Mean.stride(0), Mean.stride(1), RSTD, RSTD.stride(0), RSTD.stride(1),
        hidden_size, channels_per_group, W, B, eps, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    return Y.view(*shape)


def reference(X, num_channels, num_groups, W, B, eps=1e-6):
    return torch.nn.functional.group_norm(X, num_groups, W, B, eps)


SWEEP = [
    {"N": 2, "G": 2, "C": 3, "H": 5, "W": 7},
    {"N": 3, "G": 4, "C": 2, "H": 16, "W": 16, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    channels = dims["G"] * dims["C"]
    X = torch.randn(dims["N"], channels, dims["H"], dims["W"], device=device, dtype=dtype)
    W = torch.rand(channels, device=device, dtype=dtype)
    return X, channels, dims["G"], W, torch.rand(channels, device=device, dtype=dtype)
