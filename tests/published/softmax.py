"""Softmax: one block a row where it fits, else an online pass and a second one that writes."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import calculate_settings, ensure_contiguous


@triton.jit
def _softmax_single_block_forward_kernel(
    Y_ptr, Y_row_stride, X_ptr, X_row_stride, n_cols, BLOCK_SIZE: tl.constexpr
):
    row_id = tl.program_id(0)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols

    x = tl.load(X_ptr + row_id * X_row_stride + offs, mask=mask, other=-float("inf"), cache_modifier=".ca")
    m = tl.max(x, axis=0)
    e = tl.exp(x - m)
    d = tl.sum(e, axis=0)
    y = e / d
    tl.store(Y_ptr + row_id * Y_row_stride + offs, y, mask=mask, cache_modifier=".cs")


@triton.jit
def _softmax_multi_block_forward_kernel(
    Y_ptr, Y_row_stride, X_ptr, X_row_stride, n_cols, BLOCK_SIZE: tl.constexpr
):
    row_id = tl.program_id(0)
    offs = tl.arange(0, BLOCK_SIZE)

    m = tl.full((), -float("inf"), tl.float32)
    d = tl.zeros((), tl.float32)
    for start in tl.range(0, n_cols, BLOCK_SIZE):
        idx = start + offs
        mask = idx < n_cols
        xblk = tl.load(
            X_ptr + row_id * X_row_stride + idx, mask=mask, other=-float("inf"), cache_modifier=".ca"
        )
        blk_max = tl.max(xblk, axis=0)
        new_m = tl.maximum(m, blk_max)
        d = d * tl.exp(m - new_m) + tl.sum(tl.exp(xblk - new_m), axis=0)
        m = new_m

    for start in tl.range(0, n_cols, BLOCK_SIZE):
        idx = start + offs
        mask = idx < n_cols
        xblk = tl.load(
            X_ptr + row_id * X_row_stride + idx, mask=mask, other=-float("inf"), cache_modifier=".ca"
        )
        yblk = tl.exp(xblk - m) / d
        tl.store(Y_ptr + row_id * Y_row_stride + idx, yblk, mask=mask, cache_modifier=".cs")


MULTI_BLOCK_LAUNCH = 1024


@autodiff(inputs_require_grad=(0,))
@ensure_contiguous
def softmax(x):
    *batch, n_cols = x.shape
    x2d = x.reshape(-1, n_cols)
    n_rows = x2d.shape[0]
    BLOCK_SIZE, num_warps = calculate_settings(n_cols)
    y2d = torch.empty_like(x2d)
    if n_cols <= MULTI_BLOCK_LAUNCH:
        _softmax_single_block_forward_kernel[(n_rows,)](
            y2d, y2d.stride(0), x2d, x2d.stride(0), n_cols, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps
        )
    else:
        _softmax_multi_block_forward_kernel[(n_rows,)](
            y2d, y2d.stride(0), x2d, x2d.stride(0), n_cols, BLOCK_SIZE=MULTI_BLOCK_LAUNCH, num_warps=8
        )
    return y2d.view(*batch, n_cols)


def reference(x):
    return torch.softmax(x, dim=-1)


SWEEP = [{"B": 2, "M": 4, "N": 61}, {"B": 1, "M": 3, "N": 2500}]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["M"], dims["N"], device=device, dtype=dtype),)
