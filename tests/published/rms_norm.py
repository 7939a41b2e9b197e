"""RMS norm with casting modes and an offset of the weight: a program a row, or blocks of short rows."""

import math

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import calculate_settings, ensure_contiguous

try:
    from triton.language.extra.libdevice import rsqrt
except ModuleNotFoundError:
    from triton.language.extra.cuda.libdevice import rsqrt

_CASTING_MODE_NONE: tl.constexpr = tl.constexpr(-1)
_CASTING_MODE_LLAMA: tl.constexpr = tl.constexpr(0)
_CASTING_MODE_GEMMA: tl.constexpr = tl.constexpr(1)
_str_to_casting_mode = {
    "llama": _CASTING_MODE_LLAMA.value,
    "gemma": _CASTING_MODE_GEMMA.value,
    "none": _CASTING_MODE_NONE.value,
}
torch_to_triton_dtype = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _rms_norm_forward_kernel(
    Y_ptr,
    Y_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    W_row_stride,
    RSTD_ptr,
    RSTD_row_stride,
    n_cols,
    eps,
    offset,
    casting_mode: tl.constexpr,  # one of the constants above
    elementwise_affine: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + eps) * (offset + w); the reciprocal is kept, one a row."""
    row_idx = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols

    y_base = Y_ptr + row_idx * Y_row_stride
    x_base = X_ptr + row_idx * X_row_stride
    rstd_base = RSTD_ptr + row_idx * RSTD_row_stride

    X_row = tl.load(x_base + col_offsets, mask=mask, other=0)
    X_row_dtype = X_row.dtype
    if elementwise_affine:
        W_row = tl.load(W_ptr + col_offsets, mask=mask, other=0)

    # llama computes the reciprocal alone in float32, gemma all of it
    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_GEMMA:
        if elementwise_affine:
            W_row = W_row.to(tl.float32)
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_NONE:
        eps = eps.to(X_row_dtype)
        offset = offset.to(X_row_dtype)

    mean_square = tl.sum(X_row * X_row, axis=0) / n_cols
    rstd = rsqrt(mean_square + eps)
    tl.store(rstd_base, rstd)

    X_row = X_row * rstd
    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(X_row_dtype)
    if elementwise_affine:
        Y_row = X_row * (offset + W_row)
    else:
        Y_row = X_row
    if casting_mode == _CASTING_MODE_GEMMA:
        Y_row = Y_row.to(X_row_dtype)
    tl.store(y_base + col_offsets, Y_row, mask=mask)


@triton.jit
def _block_rms_norm_forward_kernel(
    Y_ptr,
    Y_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    W_row_stride,
    RSTD_ptr,
    RSTD_row_stride,
    n_rows,
    n_cols,
    eps,
    offset,
    casting_mode: tl.constexpr,
    elementwise_affine: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    row_idx = tl.program_id(0) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    row_mask = row_idx < n_rows
    col_mask = col_offsets < n_cols

    X_row = tl.load(
        X_ptr + row_idx[:, None] * X_row_stride + col_offsets[None, :],
        mask=row_mask[:, None] & col_mask[None, :],
        other=0,
    )
    X_row_dtype = X_row.dtype
    if elementwise_affine:
        W_row = tl.load(W_ptr + col_offsets, mask=col_mask, other=0)

    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_GEMMA:
        if elementwise_affine:
            W_row = W_row.to(tl.float32)
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_NONE:
        eps = eps.to(X_row_dtype)
        offset = offset.to(X_row_dtype)

    mean_square = tl.sum(X_row * X_row, axis=1) / n_cols
    rstd = rsqrt(mean_square + eps)
    tl.store(RSTD_ptr + row_idx * RSTD_row_stride, rstd, row_mask)

    X_row = X_row * rstd[:, None]
    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(X_row_dtype)
    if elementwise_affine:
        Y_row = X_row * (offset + W_row)[None, :]
    else:
        Y_row = X_row
    if casting_mode == _CASTING_MODE_GEMMA:
        Y_row = Y_row.to(X_row_dtype)
    tl.store(
        Y_ptr + row_idx[:, None] * Y_row_stride + col_offsets[None, :],
        Y_row,
        mask=row_mask[:, None] & col_mask[None, :],
    )


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    if not isinstance(casting_mode, int):
        assert casting_mode in _str_to_casting_mode, f"Invalid casting mode: {casting_mode}"
        casting_mode = _str_to_casting_mode[casting_mode]
    else:
        assert casting_mode in _str_to_casting_mode.values(), f"Invalid casting mode: {casting_mode}"

    shape = X.shape
    dim = shape[-1]
    X = X.view(-1, dim)
    n_rows, n_cols = X.shape
    BLOCK_SIZE, num_warps = calculate_settings(n_cols)

    Y = torch.empty((n_rows, n_cols), dtype=X.dtype, device=X.device)
    rstd_dtype = torch.float32 if casting_mode in (0, 1) else X.dtype
    RSTD = torch.empty(n_rows, dtype=rstd_dtype, device=X.device)

    elementwise_affine = W is not None
    if elementwise_affine:
        assert X.shape[1] == W.shape[0], "The last dimension of X is not that of the weight"

    # many short rows are better taken a block at a time
    if BLOCK_SIZE > 64 or n_rows < 64 or row_mode:
        _rms_norm_forward_kernel[(n_rows,)](
            Y, Y.stride(0), X, X.stride(0),
            W, W.stride(0) if elementwise_affine else 0,
            RSTD, RSTD.stride(0),
            n_cols, eps, offset, casting_mode,
            elementwise_affine=elementwise_affine, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps,
        )  # fmt: skip
    else:
        BLOCK_ROW = 16
        _block_rms_norm_forward_kernel[(math.ceil(n_rows / BLOCK_ROW),)](
            Y, Y.stride(0), X, X.stride(0),
            W, W.stride(0) if elementwise_affine else 0,
            RSTD, RSTD.stride(0),
            n_rows, n_cols, eps, offset, casting_mode,
            elementwise_affine=elementwise_affine, BLOCK_SIZE=BLOCK_SIZE, BLOCK_ROW=BLOCK_ROW,
            num_warps=num_warps,
        )  # fmt: skip
    return Y.view(*shape), X, RSTD, BLOCK_SIZE, num_warps, casting_mode


@autodiff(inputs_require_grad=(0, 1))
@ensure_contiguous
def rms_norm(X, W, eps=1e-6, offset=0.0, casting_mode="llama", row_mode=None):
    Y, *_ = rms_norm_forward(X, W, eps, offset, casting_mode, row_mode)
    return Y


def reference(X, W, eps=1e-6, offset=0.0, casting_mode="llama", row_mode=None):
    Y = X * torch.rsqrt((X * X).mean(-1, keepdim=True) + eps)
    return Y if W is None else Y * (offset + W)


SWEEP = [
    {"B": 2, "T": 6, "N": 100, "mode": "llama", "affine": True},
    {"B": 2, "T": 50, "N": 33, "mode": "gemma", "affine": True},
    {"B": 2, "T": 5, "N": 70, "mode": "llama", "affine": False},
    {"B": 4, "T": 8, "N": 1500, "mode": "gemma", "affine": True, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    X = torch.randn(dims["B"], dims["T"], dims["N"], device=device, dtype=dtype)
    W = torch.rand(dims["N"], device=device, dtype=dtype) if dims["affine"] else None
    return (X, W), {"casting_mode": dims["mode"], "offset": 1.0 if dims["mode"] == "gemma" else 0.0}
