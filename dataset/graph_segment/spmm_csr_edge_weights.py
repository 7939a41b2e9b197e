"""Sparse matrix times dense, with learned edge weights, in CSR.

Forward    y_i = sum over the edges e of row i of w_e x_{col(e)}
Backward   dx_j = sum over the edges e with col(e) = j of w_e dy_{row(e)},   dw_e = <dy_{row(e)}, x_{col(e)}>

Forward schedule: a program owns (row, column tile) and walks the row's edges.
Backward schedule: dx scatters along the CSR but gathers along the CSC, so the edge list is inverted once by
a sort of col: the owner of x_j walks the edges that point at j and stores once, without atomics. dw_e needs
no sum over edges: a program owns a tile of edges and reduces the row dots.

op: spmm
schedule: segment_gather, swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def spmm_kernel(x_ptr, w_ptr, indptr_ptr, col_ptr, y_ptr, D, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for e in range(tl.load(indptr_ptr + i), tl.load(indptr_ptr + i + 1)):
        x = tl.load(x_ptr + tl.load(col_ptr + e) * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc += tl.load(w_ptr + e).to(tl.float32) * x
    tl.store(y_ptr + i * D + d, acc, mask=d < D)


@autodiff(inputs_require_grad=(0, 1))
def spmm(x, w, indptr, col):
    """x: (columns, D); w: (edges); indptr: int64 (rows + 1); col: int64 (edges)."""
    x, w = x.contiguous(), w.contiguous()
    rows, D = indptr.numel() - 1, x.shape[1]
    y = torch.empty((rows, D), device=x.device, dtype=x.dtype)
    spmm_kernel[(rows, triton.cdiv(D, 64))](x, w, indptr, col, y, D, BLOCK=64)
    return y


def reference(x, w, indptr, col):
    rows = indptr.numel() - 1
    row = torch.repeat_interleave(torch.arange(rows, device=x.device), indptr.diff())
    return x.new_zeros(rows, x.shape[1]).index_add(0, row, w[:, None] * x[col])


SWEEP = [
    {"nodes": 169343, "E": 1166243, "D": 128},
    {"nodes": 65536, "E": 1 << 20, "D": 256},
    {"nodes": 50021, "E": 400009, "D": 100},
]
SWEEP_CPU = [{"nodes": 21, "E": 90, "D": 24}, {"nodes": 5, "E": 12, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    nodes, E = dims["nodes"], dims["E"]
    row = torch.randint(0, nodes, (E,), device=device).sort().values
    indptr = torch.searchsorted(row, torch.arange(nodes + 1, device=device))
    x = torch.randn(nodes, dims["D"], device=device, dtype=dtype)
    return x, torch.randn(E, device=device, dtype=dtype), indptr, torch.randint(0, nodes, (E,), device=device)


# ---- backward ----


@triton.jit
def dx_kernel(dy_ptr, w_ptr, begin_ptr, edge_ptr, row_ptr, dx_ptr, D, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(tl.load(begin_ptr + j), tl.load(begin_ptr + j + 1)):
        e = tl.load(edge_ptr + position)
        dy = tl.load(dy_ptr + tl.load(row_ptr + e) * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc += tl.load(w_ptr + e).to(tl.float32) * dy
    tl.store(dx_ptr + j * D + d, acc, mask=d < D)


@triton.jit
def dw_kernel(dy_ptr, x_ptr, row_ptr, col_ptr, dw_ptr, E, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr):
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.load(row_ptr + e, mask=e < E, other=0)
    col = tl.load(col_ptr + e, mask=e < E, other=0)
    products = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (e[:, None] < E) & (d[None, :] < D)
        dy = tl.load(dy_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        products += dy * tl.load(x_ptr + col[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dw_ptr + e, tl.sum(products, axis=1), mask=e < E)


class SpMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, indptr, col):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w, indptr, col)
        return spmm(x, w, indptr, col)

    @staticmethod
    def backward(ctx, dy):
        x, w, indptr, col = ctx.saved_tensors
        dy = dy.contiguous()
        (columns, D), E = x.shape, w.numel()
        row = torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=x.device), indptr.diff())
        dx = dw = None
        if ctx.needs_input_grad[0]:
            edge = torch.argsort(col, stable=True)
            begin = torch.searchsorted(col[edge], torch.arange(columns + 1, device=x.device))
            dx = torch.empty_like(x)
            dx_kernel[(columns, triton.cdiv(D, 64))](dy, w, begin, edge, row, dx, D, BLOCK=64)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            dw_kernel[(triton.cdiv(E, 16),)](dy, x, row, col, dw, E, D, BLOCK_E=16, BLOCK_D=32)
        return dx, dw, None, None


def spmm_autograd(x, w, indptr, col):
    return SpMM.apply(x, w, indptr, col)
