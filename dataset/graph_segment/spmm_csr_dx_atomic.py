"""Sparse matrix times dense with learned weights, in CSR; the backward walks the edges once.

Forward    y_i = sum over the edges e of row i of w_e x_{col(e)}
Backward   dw_e = <dy_i, x_{col(e)}>,   dx_j = sum over the edges e with col(e) = j of w_e dy_i

Forward schedule: a program owns a row, all its columns in one tile, and walks the row's edges.
Backward schedule: the same owner walks the same edges with dy_i in registers. An edge's dw is a dot with the
row of x that it gathers, and the edge's part of dx goes to the same row: one atomic add of a row. Both
gradients come from one walk of the list as it is. Gathering dx needs the list by columns, a sort of all
edges: that pays where the graph stays and the sort is kept. Where each step brings another graph, as
sampled neighbourhoods do, the sort costs more than adding rows that few edges share; the sums are then in no
fixed order.

op: spmm
schedule: atomic_accumulate, row_reduce_correct
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def spmm_kernel(first_ptr, col_ptr, w_ptr, x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for e in range(tl.load(first_ptr + i), tl.load(first_ptr + i + 1)):
        x = tl.load(x_ptr + tl.load(col_ptr + e) * D + d, mask=d < D, other=0.0)
        y += tl.load(w_ptr + e) * x
    tl.store(y_ptr + i * D + d, y, mask=d < D)


@autodiff(inputs_require_grad=(2, 3))
def spmm(first, col, w, x):
    """first: int64 (rows + 1); col: int64 (edges), rows of x; w: float32 (edges); x: float32 (nodes, D)."""
    (_, D), rows = x.shape, first.numel() - 1
    if w.shape != col.shape or D > 4096:
        raise ValueError(f"{tuple(w.shape)} weights for {tuple(col.shape)} edges, rows of {D}; up to 4096")
    y = torch.empty((rows, D), device=x.device, dtype=x.dtype)
    inputs = [tensor.contiguous() for tensor in (first, col, w, x)]
    spmm_kernel[(rows,)](*inputs, y, D, BLOCK=triton.next_power_of_2(D))
    return y


def reference(first, col, w, x):
    row = torch.repeat_interleave(torch.arange(first.numel() - 1, device=x.device), first.diff())
    return x.new_zeros(first.numel() - 1, x.shape[1]).index_add(0, row, w[:, None] * x[col])


SWEEP = [
    {"rows": 50000, "nodes": 100000, "edges": 1000000, "D": 128},
    {"rows": 3001, "nodes": 1009, "edges": 60013, "D": 200},
]
SWEEP_CPU = [{"rows": 17, "nodes": 9, "edges": 60, "D": 33}, {"rows": 5, "nodes": 30, "edges": 25, "D": 8}]


def make_args(dims, device="cuda", dtype=torch.float32):
    rows, edges = dims["rows"], dims["edges"]
    row = torch.randint(0, rows, (edges,), device=device).sort().values
    first = torch.searchsorted(row, torch.arange(rows + 1, device=device))
    col = torch.randint(0, dims["nodes"], (edges,), device=device)
    x = torch.randn(dims["nodes"], dims["D"], device=device, dtype=dtype)
    return first, col, torch.randn(edges, device=device, dtype=dtype), x


# ---- backward ----


@triton.jit
def spmm_backward_kernel(
    first_ptr, col_ptr, w_ptr, x_ptr, dy_ptr, dw_ptr, dx_ptr, D,
    WANT_W: tl.constexpr, WANT_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i * D + d, mask=d < D, other=0.0)
    for e in range(tl.load(first_ptr + i), tl.load(first_ptr + i + 1)):
        at = tl.load(col_ptr + e) * D + d
        if WANT_W:
            tl.store(dw_ptr + e, tl.sum(dy * tl.load(x_ptr + at, mask=d < D, other=0.0), axis=0))
        if WANT_X:
            tl.atomic_add(dx_ptr + at, tl.load(w_ptr + e) * dy, mask=d < D, sem="relaxed")


class Spmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, col, w, x):
        inputs = [tensor.contiguous() for tensor in (first, col, w, x)]
        ctx.save_for_backward(*inputs)
        return spmm(*inputs)

    @staticmethod
    def backward(ctx, dy):
        first, col, w, x = ctx.saved_tensors
        _, _, want_w, want_x = ctx.needs_input_grad
        dw, dx = torch.empty_like(w) if want_w else None, torch.zeros_like(x) if want_x else None
        D, BLOCK = x.shape[1], triton.next_power_of_2(x.shape[1])
        spmm_backward_kernel[(first.numel() - 1,)](
            first, col, w, x, dy.contiguous(), dw, dx, D, WANT_W=want_w, WANT_X=want_x, BLOCK=BLOCK
        )
        return None, None, dw, dx


def spmm_autograd(first, col, w, x):
    return Spmm.apply(first, col, w, x)
