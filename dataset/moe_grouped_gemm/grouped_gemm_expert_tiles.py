"""Grouped matrix product: rows sorted by expert, each expert with a weight of its own.

Forward    Y_i = X_i W_e for the rows i of expert e, offsets_e <= i < offsets_{e+1}
Backward   dX_i = dY_i W_e^T,   dW_e = sum over e's rows of X_i^T dY_i

Forward schedule: a table made from the offsets lists (expert, first row) of every row tile; a program owns
a table entry and a column tile, so that no tile mixes experts and no program is idle.
Backward schedule: dX reuses the table with the weight read transposed. dW needs another ownership: (expert,
K x N tile) walks the rows of its expert, accumulates in registers and stores once; an expert without rows
walks none and stores the zeros that are its gradient. No atomics and no zero fill.

op: grouped_gemm
schedule: swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


def tile_table(offsets, BLOCK):
    """int64 (tiles, 2): the expert and the first row of each row tile."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    expert = torch.repeat_interleave(torch.arange(tiles.numel(), device=offsets.device), tiles)
    tile = torch.arange(expert.numel(), device=offsets.device) - (tiles.cumsum(0) - tiles)[expert]
    return torch.stack([expert, offsets[expert] + tile * BLOCK], dim=1)


@triton.jit
def grouped_gemm_kernel(
    x_ptr, w_ptr, offsets_ptr, table_ptr, y_ptr, N, K, stride_we, stride_wk, stride_wn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(table_ptr + 2 * tl.program_id(0))
    end = tl.load(offsets_ptr + expert + 1)
    m = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x_mask = (m[:, None] < end) & (k[None, :] < K)
        w_mask = (k[:, None] < K) & (n[None, :] < N)
        w_offs = expert * stride_we + k[:, None] * stride_wk + n[None, :] * stride_wn
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(x, tl.load(w_ptr + w_offs, mask=w_mask, other=0.0), acc, input_precision=PRECISION)
    y_mask = (m[:, None] < end) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


def launch_grouped_gemm(x, w, offsets, table):
    """Rows of x by the weights of their experts; w may be a transposed view."""
    K, N = w.shape[1:]
    y = torch.empty((x.shape[0], N), device=x.device, dtype=x.dtype)
    tiles = tiling(x)
    grid = (table.shape[0], triton.cdiv(N, tiles["BLOCK"]))
    grouped_gemm_kernel[grid](x, w, offsets, table, y, N, K, *w.stride(), **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def grouped_gemm(x, w, offsets):
    """x: (rows, K); w: (experts, K, N); offsets: int64 (experts + 1), from 0 to rows, not decreasing."""
    return launch_grouped_gemm(x.contiguous(), w, offsets, tile_table(offsets, tiling(x)["BLOCK"]))


def reference(x, w, offsets):
    parts = x.split(offsets.diff().tolist())
    return torch.cat([part @ w[e] for e, part in enumerate(parts)])


SWEEP = [
    {"E0": 4096, "E1": 0, "E2": 2048, "E3": 2047, "K": 2048, "N": 1408},
    {"E0": 1024, "E1": 1, "E2": 3000, "E3": 512, "K": 2048, "N": 4096},
    {"E0": 500, "E1": 0, "E2": 1333, "E3": 77, "K": 1001, "N": 2817},
]
SWEEP_CPU = [
    {"E0": 7, "E1": 0, "E2": 22, "E3": 12, "K": 32, "N": 40},
    {"E0": 40, "E1": 1, "E2": 2, "E3": 33, "K": 19, "N": 16},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    sizes = torch.tensor([dims[f"E{e}"] for e in range(4)], device=device)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    x = torch.randn(int(offsets[-1]), dims["K"], device=device, dtype=dtype)
    return x, torch.randn(4, dims["K"], dims["N"], device=device, dtype=dtype), offsets


# ---- backward ----


@triton.jit
def dw_kernel(
    x_ptr, dy_ptr, offsets_ptr, dw_ptr, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        x_mask = (m[None, :] < end) & (k[:, None] < K)
        dy_mask = (m[:, None] < end) & (n[None, :] < N)
        x_t = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=x_mask, other=0.0)
        dy = tl.load(dy_ptr + m[:, None] * N + n[None, :], mask=dy_mask, other=0.0)
        acc = tl.dot(x_t, dy, acc, input_precision=PRECISION)
    dw_mask = (k[:, None] < K) & (n[None, :] < N)
    dw_offs = (expert * K + k[:, None]) * N + n[None, :]
    tl.store(dw_ptr + dw_offs, acc.to(dw_ptr.dtype.element_ty), mask=dw_mask)


class GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offsets):
        x, table = x.contiguous(), tile_table(offsets, tiling(x)["BLOCK"])
        ctx.save_for_backward(x, w, offsets, table)
        return launch_grouped_gemm(x, w, offsets, table)

    @staticmethod
    def backward(ctx, dy):
        x, w, offsets, table = ctx.saved_tensors
        dy = dy.contiguous()
        E, K, N = w.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = launch_grouped_gemm(dy, w.transpose(1, 2), offsets, table)
        if ctx.needs_input_grad[1]:
            dw = torch.empty((E, K, N), device=w.device, dtype=w.dtype)
            tiles = tiling(x)
            grid = (triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]), E)
            dw_kernel[grid](x, dy, offsets, dw, N, K, **tiles)
        return dx, dw, None


def grouped_gemm_autograd(x, w, offsets):
    return GroupedGemm.apply(x, w, offsets)
