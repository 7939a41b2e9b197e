"""RMS norm of x + residual, in one of three casting modes, with a row or a block of rows a program.

The modes are those of model families: everything in float32, the statistics alone, or nothing.
"""

import operator

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import calculate_settings, ensure_contiguous

try:
    from triton.language.extra.libdevice import rsqrt
except ModuleNotFoundError:
    from triton.language.math import rsqrt

_CASTING_MODE_NONE: tl.constexpr = tl.constexpr(-1)
_CASTING_MODE_LLAMA: tl.constexpr = tl.constexpr(0)
_CASTING_MODE_GEMMA: tl.constexpr = tl.constexpr(1)
_str_to_casting_mode = {
    "llama": _CASTING_MODE_LLAMA.value,
    "gemma": _CASTING_MODE_GEMMA.value,
    "none": _CASTING_MODE_NONE.value,
}
_calls = 0


@triton.jit
def _rms_norm_row_kernel(
    Y_ptr, Y_row_stride, S_ptr, S_row_stride, X_ptr, X_row_stride, R_ptr, R_row_stride,
    W_ptr, RSTD_ptr, n_cols, eps, offset,
    casting_mode: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ELEMENTWISE_AFFINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row_idx = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols

    X_row = tl.load(X_ptr + row_idx * X_row_stride + col_offsets, mask=mask, other=0)
    if HAS_RESIDUAL:
        X_row += tl.load(R_ptr + row_idx * R_row_stride + col_offsets, mask=mask, other=0)
        tl.store(S_ptr + row_idx * S_row_stride + col_offsets, X_row, mask=mask)
    X_row_dtype = X_row.dtype
    if ELEMENTWISE_AFFINE:
        W_row = tl.load(W_ptr + col_offsets, mask=mask, other=0)

    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_GEMMA:
        if ELEMENTWISE_AFFINE:
            W_row = W_row.to(tl.float32)
        X_row = X_row.to(tl.float32)
    if casting_mode == _CASTING_MODE_NONE:
        eps = eps.to(X_row_dtype)
        offset = offset.to(X_row_dtype)

    mean_square = tl.sum(X_row * X_row, axis=0) / n_cols
    rstd = rsqrt(mean_square + eps)
    tl.store(RSTD_ptr + row_idx, rstd)
    X_row = X_row * rstd
    if casting_mode == _CASTING_MODE_LLAMA:
        X_row = X_row.to(X_row_dtype)
    Y_row = X_row * (offset + W_row) if ELEMENTWISE_AFFINE else X_row
    if casting_mode == _CASTING_MODE_GEMMA:
        Y_row = Y_row.to(X_row_dtype)
    tl.store(Y_ptr + row_idx * Y_row_stride + col_offsets, Y_row, mask=mask)


def rms_norm_forward(X, R, W, eps, offset, casting_mode):
    global _calls
    _calls += 1
    if not isinstance(casting_mode, int):
        assert casting_mode in _str_to_casting_mode, f"Invalid casting mode: {casting_mode}"
        casting_mode = _str_to_casting_mode[casting_mode]
    shape = X.shape
    dim = shape[-1]
    X = X.view(-1, dim)
    n_rows, n_cols = X.shape
    BLOCK_SIZE, num_warps = calculate_settings(n_cols)
    Y = torch.empty((n_rows, n_cols), dtype=X.dtype, device=X.device)
    S = torch.empty_like(X) if R is not None else None
    R = R.view(-1, dim) if R is not None else None
    rstd_dtype = torch.float32 if casting_mode in (0, 1) else X.dtype
    RSTD = torch.empty(n_rows, dtype=rstd_dtype, device=X.device)
    if W is not None:
        assert operator.eq(X.shape[1], W.shape[0]), "Incompatible hidden size dimension"
    kernel_args = {}
    if X.device.type == "xpu":
        kernel_args["grf_mode"] = "large"
    _rms_norm_row_kernel[(n_rows,)](
        Y, Y.stride(0), S, S.stride(0) if S is not None else 0, X, X.stride(0),
        R, R.stride(0) if R is not None else 0, W, RSTD, n_cols, eps, offset, casting_mode,
        HAS_RESIDUAL=R is not None, ELEMENTWISE_AFFINE=W is not None, BLOCK_SIZE=BLOCK_SIZE,
        num_warps=num_warps, **kernel_args,
    )  # fmt: skip
    return Y.view(*shape), S.view(*shape) if S is not None else None


@autodiff(inputs_require_grad=(0, 1, 2))
@ensure_contiguous
def rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama"):
    return rms_norm_forward(X, R, W, eps, offset, casting_mode)


SWEEP = [
    {"B": 2, "T": 5, "N": 72, "mode": "llama", "residual": True, "affine": True},
    {"B": 2, "T": 3, "N": 130, "mode": "gemma", "residual": False, "affine": True},
    {"B": 1, "T": 7, "N": 48, "mode": "llama", "residual": True, "affine": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["N"])
    X = torch.randn(shape, device=device, dtype=dtype)
    R = torch.randn(shape, device=device, dtype=dtype) if dims["residual"] else None
    W = torch.rand(dims["N"], device=device, dtype=dtype) if dims["affine"] else None
    return (X, R, W), {"offset": 1.0 if dims["mode"] == "gemma" else 0.0, "casting_mode": dims["mode"]}
