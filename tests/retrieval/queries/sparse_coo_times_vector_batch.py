import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def spmm(rows, cols, vals, dense, out, C, P: tl.constexpr):
    k = tl.program_id(0)
    r, c, v = tl.load(rows + k), tl.load(cols + k), tl.load(vals + k)
    for c0 in range(0, C, P):
        j = c0 + tl.arange(0, P)
        tl.atomic_add(out + r * C + j, v * tl.load(dense + c * C + j, mask=j < C, other=0.0), mask=j < C)


@autodiff(inputs_require_grad=(2, 3))
def coo_mm(rows, cols, vals, dense, n):
    out = torch.zeros(n, dense.shape[1], device=dense.device)
    spmm[(rows.numel(),)](rows, cols, vals, dense, out, dense.shape[1], P=128)
    return out
