"""Layer norm, a program a row, mean and reciprocal deviation kept beside the result."""

import operator

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import calculate_settings, compare_version, ensure_contiguous

if compare_version("triton", operator.ge, "3.0.0"):
    try:
        from triton.language.extra.libdevice import rsqrt
    except ModuleNotFoundError:
        from triton.language.extra.cuda.libdevice import rsqrt
else:
    from triton.language.math import rsqrt


@triton.jit
def _layer_norm_forward_kernel(
    Y_ptr,
    Y_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    W_row_stride,
    B_ptr,
    B_row_stride,
    Mean_ptr,
    Mean_row_stride,
    RSTD_ptr,
    RSTD_row_stride,
    n_cols,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row_idx = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols

    row_X_ptr = X_ptr + row_idx * X_row_stride
    row_Y_ptr = Y_ptr + row_idx * Y_row_stride
    row_Mean_ptr = Mean_ptr + row_idx * Mean_row_stride
    row_RSTD_ptr = RSTD_ptr + row_idx * RSTD_row_stride

    X_row = tl.load(row_X_ptr + col_offsets, mask=mask, other=0.0)
    W_row = tl.load(W_ptr + col_offsets, mask=mask, other=0.0)
    X_f32 = X_row.to(tl.float32)

    mean = tl.sum(X_f32, axis=0) / n_cols
    X_centered = X_f32 - mean
    X_centered_masked = tl.where(mask, X_centered, 0.0)
    var = tl.sum(X_centered_masked * X_centered_masked, axis=0) / n_cols
    rstd = rsqrt(var + eps)
    tl.store(row_Mean_ptr, mean.to(X_row.dtype))
    tl.store(row_RSTD_ptr, rstd.to(X_row.dtype))

    output = X_centered * rstd * W_row.to(tl.float32)
    if HAS_BIAS:
        B_row = tl.load(B_ptr + col_offsets, mask=mask, other=0.0)
        output += B_row.to(tl.float32)
    tl.store(row_Y_ptr + col_offsets, output.to(X_row.dtype), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
@ensure_contiguous
def layer_norm(X, W, B=None, eps=1e-6):
    shape = X.shape
    dim = shape[-1]
    X = X.view(-1, dim)
    n_rows, n_cols = X.shape
    BLOCK_SIZE, num_warps = calculate_settings(n_cols)
    Y = torch.empty((n_rows, n_cols), dtype=X.dtype, device=X.device)
    Mean = torch.empty(n_rows, dtype=X.dtype, device=X.device)
    RSTD = torch.empty(n_rows, dtype=X.dtype, device=X.device)
    if X.shape[1] != W.shape[0]:
        raise ValueError(f"Incompatible dimensions: {X.shape[1]} columns, a weight of {W.shape[0]}")

    kernel_args = {"num_warps": num_warps}
    if X.device.type == "xpu":
        kernel_args["grf_mode"] = "large"
    _layer_norm_forward_kernel[(n_rows,)](
        Y, Y.stride(0), X, X.stride(0), W, W.stride(0), B, B.stride(0) if B is not None else 0,
        Mean, Mean.stride(0), RSTD, RSTD.stride(0), n_cols, eps,
        HAS_BIAS=B is not None, BLOCK_SIZE=BLOCK_SIZE, **kernel_args,
    )  # fmt: skip
    return Y.view(*shape), Mean, RSTD


def reference(X, W, B=None, eps=1e-6):
    mean = X.mean(-1, keepdim=True)
    rstd = torch.rsqrt(((X - mean) ** 2).mean(-1, keepdim=True) + eps)
    Y = (X - mean) * rstd * W
    return (Y if B is None else Y + B), mean.reshape(-1), rstd.reshape(-1)


SWEEP = [
    {"B": 2, "T": 5, "N": 90, "bias": True},
    {"B": 1, "T": 7, "N": 64, "bias": False},
    {"B": 4, "T": 6, "N": 2050, "bias": True, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    X = torch.randn(dims["B"], dims["T"], dims["N"], device=device, dtype=dtype)
    W = torch.rand(dims["N"], device=device, dtype=dtype)
    B = torch.rand(dims["N"], device=device, dtype=dtype) if dims["bias"] else None
    return X, W, B
