"""SwiGLU, silu(a) * b, one program a row: rows of any leading shape, the upcast for the sigmoid alone."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import calculate_settings, ensure_contiguous


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _swiglu_forward_kernel(a_ptr, b_ptr, c_ptr, stride, n_cols: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    program_id = tl.program_id(0).to(tl.int64)

    a_ptr += program_id * stride
    b_ptr += program_id * stride
    c_ptr += program_id * stride

    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols

    # the sigmoid needs float32
    a_row = tl.load(a_ptr + col_offsets, mask=mask, other=0).to(tl.float32)
    b_row = tl.load(b_ptr + col_offsets, mask=mask, other=0)
    c_row = silu(a_row).cast(b_row.dtype) * b_row
    tl.store(c_ptr + col_offsets, c_row, mask=mask)


def swiglu_forward(a, b):
    ori_shape = a.shape
    n_cols = ori_shape[-1]
    a = a.view(-1, n_cols)
    b = b.view(-1, n_cols)
    c = torch.empty_like(a)
    n_rows = a.shape[0]

    BLOCK_SIZE, num_warps = calculate_settings(n_cols)
    _swiglu_forward_kernel[(n_rows,)](
        a, b, c, c.stride(-2), n_cols=n_cols, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps
    )
    return a, b, c.view(*ori_shape)


@autodiff(inputs_require_grad=(0, 1))
@ensure_contiguous
def swiglu(a, b):
    _, _, c = swiglu_forward(a, b)
    return c


def reference(a, b):
    return torch.nn.functional.silu(a) * b


SWEEP = [{"B": 2, "T": 5, "N": 96}, {"B": 4, "T": 8, "N": 1000, "required": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["N"])
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
