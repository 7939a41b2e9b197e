"""Grouped matrix product over experts of very different sizes; the weights' gradient is split by rows.

Forward    rows sorted by expert, those of e from offsets_e to offsets_{e+1}:   Y_i = x_i W_e
Backward   dx_i = dy_i W_e^T,   dW_e = sum over the rows i of e of x_i^T dy_i

Forward schedule: a table from the offsets lists (expert, first row) of every row tile. A program owns a table
entry and a column tile and walks K.
Backward schedule: dX is the same kernel on the weights read transposed. One owner of a tile of dW_e, walking
all rows of e, takes as long as e has rows: with one favourite expert most of the GPU waits for it. So the
rows of each expert are cut into parts of at most a sixteenth of all rows; there are at most 16 parts more
than experts, however the rows are spread. A program owns (part, tile of K x N) and stores a partial tile into
the part's slot. The parts of an expert stand next to each other, and the tile's owner adds them in order: no
atomics, the same result each time, and zeros for an expert without parts.

op: grouped_gemm
schedule: partials_then_reduce, swap_owner
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


def cut_rows(offsets, size):
    """Every expert's rows in pieces of at most `size`: int64 (pieces, 2), the expert and the first row of
    each, and int64 (experts + 1), where the pieces of each expert begin.
    """
    pieces = (offsets.diff() + size - 1) // size
    begin = torch.nn.functional.pad(pieces.cumsum(0), (1, 0))
    expert = torch.repeat_interleave(torch.arange(pieces.numel(), device=offsets.device), pieces)
    piece = torch.arange(expert.numel(), device=offsets.device) - begin[expert]
    return torch.stack([expert, offsets[expert] + piece * size], dim=1), begin


@triton.jit
def load_tile(ptr, rows, cols, row_mask, col_mask, stride_r, stride_c):
    mask = row_mask[:, None] & col_mask[None, :]
    return tl.load(ptr + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=mask, other=0.0)


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, offsets_ptr, table_ptr, y_ptr, N, K, stride_we, stride_wk, stride_wn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(table_ptr + 2 * tl.program_id(0))
    i = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    inside = i < tl.load(offsets_ptr + expert + 1)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, i, k, inside, k < K, K, 1)
        w = load_tile(w_ptr + expert * stride_we, k, n, k < K, n < N, stride_wk, stride_wn)
        y = tl.dot(x, w, y, input_precision=PRECISION)
    y_offs = i[:, None] * N + n[None, :]
    tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (n[None, :] < N))


def grouped_product(x, w, offsets):
    """Rows of x by the weight of their expert; w may be a transposed view."""
    (K, N), tiles = w.shape[1:], tiling(x)
    table, _ = cut_rows(offsets, tiles["BLOCK"])
    y = torch.empty((x.shape[0], N), device=x.device, dtype=x.dtype)
    grid = (table.shape[0], triton.cdiv(N, tiles["BLOCK"]))
    grouped_kernel[grid](x, w, offsets, table, y, N, K, *w.stride(), **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def grouped_gemm(x, w, offsets):
    """x: (T, K), sorted by expert; w: (experts, K, N); offsets: int64 (experts + 1), from 0 to T."""
    if w.shape[1] != x.shape[1] or offsets.shape[0] != w.shape[0] + 1:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and {offsets.shape[0]} offsets do not fit")
    return grouped_product(x.contiguous(), w, offsets)


def reference(x, w, offsets):
    return torch.cat([part @ w[e] for e, part in enumerate(x.split(offsets.diff().tolist()))])


SWEEP = [
    {"T": 16384, "E": 8, "K": 1024, "N": 1408},
    {"T": 8209, "E": 32, "K": 1000, "N": 768},
]
SWEEP_CPU = [{"T": 68, "E": 3, "K": 16, "N": 24}, {"T": 131, "E": 5, "K": 37, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E, K, N = (dims[name] for name in ("T", "E", "K", "N"))
    x = torch.randn(T, K, device=device, dtype=dtype)
    w = torch.randn(E, K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    expert = torch.rand(T, device=device).pow(4).mul(E).long().clamp(max=E - 1)  # the first is the favourite
    return x, w, torch.searchsorted(expert.sort().values, torch.arange(E + 1, device=device))


# ---- backward ----


@triton.jit
def part_kernel(
    x_ptr, dy_ptr, offsets_ptr, parts_ptr, slots_ptr, N, K, size,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(2).to(tl.int64)
    first = tl.load(parts_ptr + 2 * part + 1)
    end = tl.minimum(first + size, tl.load(offsets_ptr + tl.load(parts_ptr + 2 * part) + 1))
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.trans(load_tile(x_ptr, i, k, i < end, k < K, K, 1))
        dy = load_tile(dy_ptr, i, n, i < end, n < N, N, 1)
        dw = tl.dot(x, dy, dw, input_precision=PRECISION)
    offs = (part * K + k[:, None]) * N + n[None, :]
    tl.store(slots_ptr + offs, dw, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def sum_parts_kernel(slots_ptr, begin_ptr, dw_ptr, size, BLOCK: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(tl.load(begin_ptr + expert), tl.load(begin_ptr + expert + 1)):
        dw += tl.load(slots_ptr + part * size + i, mask=i < size, other=0.0)
    tl.store(dw_ptr + expert * size + i, dw.to(dw_ptr.dtype.element_ty), mask=i < size)


class GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offsets):
        x = x.contiguous()
        ctx.save_for_backward(x, w, offsets)
        return grouped_gemm(x, w, offsets)

    @staticmethod
    def backward(ctx, dy):
        x, w, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        T, (E, K, N), tiles = x.shape[0], w.shape, tiling(x)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_product(dy, w.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            BLOCK = tiles["BLOCK"]
            size = max(1, triton.cdiv(T, 16 * BLOCK)) * BLOCK
            parts, begin = cut_rows(offsets, size)
            slots = torch.empty((parts.shape[0], K, N), device=x.device, dtype=torch.float32)
            grid = (triton.cdiv(K, BLOCK), triton.cdiv(N, BLOCK), parts.shape[0])
            part_kernel[grid](x, dy, offsets, parts, slots, N, K, size, **tiles)
            dw = torch.empty((E, K, N), device=w.device, dtype=w.dtype)
            sum_parts_kernel[(triton.cdiv(K * N, 256), E)](slots, begin, dw, K * N, BLOCK=256)
        return dx, dw, None


def grouped_gemm_autograd(x, w, offsets):
    return GroupedGemm.apply(x, w, offsets)
