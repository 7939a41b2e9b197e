"""Sparse matrix times dense from an unsorted edge list.

Forward    y_{r_e} += w_e x_{c_e} over all edges e
Backward   dx_{c_e} += w_e dy_{r_e},   dw_e = <dy_{r_e}, x_{c_e}>

Forward schedule: a program owns a tile of edges, gathers and adds by atomics into a zeroed fp32 buffer.
Backward schedule: the adjoint of gather and scatter is scatter and gather, so the same edge owner reads
both rows once, reduces dw_e and adds w_e dy into dx by atomics. For a list that is used once, sorting it
into CSC would cost more than the atomics.

op: coo_spmm
schedule: atomic_accumulate
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def coo_spmm_kernel(
    x_ptr, w_ptr, row_ptr, col_ptr, y_ptr, E, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (e[:, None] < E) & (d[None, :] < D)
    row = tl.load(row_ptr + e, mask=e < E, other=0)
    col = tl.load(col_ptr + e, mask=e < E, other=0)
    w = tl.load(w_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + col[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(y_ptr + row[:, None] * D + d[None, :], w[:, None] * x, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def coo_spmm(x, w, row, col, rows):
    """x: (columns, D); w: (edges); row, col: int64 (edges); rows: the number of rows of the result."""
    x, w = x.contiguous(), w.contiguous()
    E, D = w.numel(), x.shape[1]
    y = torch.zeros((rows, D), device=x.device, dtype=torch.float32)
    coo_spmm_kernel[(triton.cdiv(E, 16), triton.cdiv(D, 32))](x, w, row, col, y, E, D, BLOCK_E=16, BLOCK_D=32)
    return y.to(x.dtype)


def reference(x, w, row, col, rows):
    return x.new_zeros(rows, x.shape[1]).index_add(0, row, w[:, None] * x[col])


SWEEP = [
    {"R": 65536, "C": 65536, "nnz": 1 << 20, "D": 128},
    {"R": 169343, "C": 169343, "nnz": 1166243, "D": 64},
    {"R": 40009, "C": 50021, "nnz": 300007, "D": 100},
]
SWEEP_CPU = [{"R": 19, "C": 23, "nnz": 85, "D": 16}, {"R": 4, "C": 6, "nnz": 16, "D": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    nnz = dims["nnz"]
    row = torch.randint(0, dims["R"], (nnz,), device=device)
    col = torch.randint(0, dims["C"], (nnz,), device=device)
    x = torch.randn(dims["C"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(nnz, device=device, dtype=dtype), row, col, dims["R"]


# ---- backward ----


@triton.jit
def coo_spmm_backward_kernel(
    x_ptr, w_ptr, row_ptr, col_ptr, dy_ptr, dx_ptr, dw_ptr, E, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.load(row_ptr + e, mask=e < E, other=0)
    col = tl.load(col_ptr + e, mask=e < E, other=0)
    w = tl.load(w_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    products = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (e[:, None] < E) & (d[None, :] < D)
        dy = tl.load(dy_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        products += dy * tl.load(x_ptr + col[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.atomic_add(dx_ptr + col[:, None] * D + d[None, :], w[:, None] * dy, mask=mask)
    tl.store(dw_ptr + e, tl.sum(products, axis=1), mask=e < E)


class CooSpMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, row, col, rows):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w, row, col)
        return coo_spmm(x, w, row, col, rows)

    @staticmethod
    def backward(ctx, dy):
        x, w, row, col = ctx.saved_tensors
        dy = dy.contiguous()
        E, D = w.numel(), x.shape[1]
        dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        dw = torch.empty_like(w)
        coo_spmm_backward_kernel[(triton.cdiv(E, 16),)](
            x, w, row, col, dy, dx, dw, E, D, BLOCK_E=16, BLOCK_D=32
        )
        needs = ctx.needs_input_grad
        return dx.to(x.dtype) if needs[0] else None, dw if needs[1] else None, None, None, None


def coo_spmm_autograd(x, w, row, col, rows):
    return CooSpMM.apply(x, w, row, col, rows)
