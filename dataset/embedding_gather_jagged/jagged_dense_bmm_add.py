"""Packed sequences times a matrix of their own, plus a bias: ragged batches without padding.

Forward    Y_i = X_i W_b + c_b for the rows i of sequence b
Backward   dX_i = dY_i W_b^T,  dW_b = sum over the rows i of b of X_i^T dY_i,  dc_b = the same sum of dY_i

Forward schedule: a program owns (sequence, tile of its rows, tile of columns). The grid goes to the longest
sequence, and tiles beyond an end leave at once.
Backward schedule: dX keeps the grid with W transposed: a row belongs to one sequence, so its owner needs that
W alone. W_b was read by all row tiles of b, so it gets an owner: (sequence, tile of W_b) walks that
sequence's rows, from its offset to its end, and stores once; the batch itself splits the sum, and no parts
are left. dc is the column sum of the very dY that this walk loads, so the programs of the first row
of tiles add it up on the way. An empty sequence gets zeros from an empty loop.

op: jagged_bmm
schedule: swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, end, C):
    mask = (rows[:, None] < end) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, end, C):
    mask = (rows[:, None] < end) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def jagged_bmm_kernel(
    x_ptr, w_ptr, c_ptr, offsets_ptr, y_ptr, K, N, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1)
    rows = tl.load(offsets_ptr + b) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(offsets_ptr + b) + tl.program_id(1) * BLOCK < end:
        y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            w = load_tile(w_ptr + b * K * N, k, cols, K, N)
            y = tl.dot(load_tile(x_ptr, rows, k, end, K), w, y, input_precision=PRECISION)
        c = tl.load(c_ptr + b * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        store_tile(y_ptr, y + c[None, :], rows, cols, end, N)


@autodiff(inputs_require_grad=(0, 1, 2))
def jagged_bmm(x, w, c, offsets, longest):
    """x: (rows, K); w: (B, K, N); c: (B, N); offsets: int64 (B + 1), from 0 to rows, not decreasing;
    longest: no less than any sequence. Gives (rows, N)."""
    x, w, c = x.contiguous(), w.contiguous(), c.contiguous()
    B, K, N = w.shape
    tiles = tiles_of(x)
    y = torch.empty((x.shape[0], N), device=x.device, dtype=x.dtype)
    grid = (B, triton.cdiv(longest, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    jagged_bmm_kernel[grid](x, w, c, offsets, y, K, N, **tiles)
    return y


def reference(x, w, c, offsets, longest):
    parts = x.split(offsets.diff().tolist())
    return torch.cat([part @ w[b] + c[b] for b, part in enumerate(parts)])


SWEEP = [{"B": 64, "L": 512, "K": 256, "N": 512}, {"B": 33, "L": 300, "K": 130, "N": 250}]
SWEEP_CPU = [{"B": 4, "L": 17, "K": 22, "N": 40}, {"B": 2, "L": 70, "K": 35, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, L, K, N = (dims[name] for name in "BLKN")
    lengths = torch.randint(0, L + 1, (B,), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    x = torch.randn(int(offsets[-1]), K, device=device, dtype=dtype)
    w = torch.randn(B, K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, w, torch.randn(B, N, device=device, dtype=dtype), offsets, L


# ---- backward ----


@triton.jit
def dx_kernel(
    w_ptr, offsets_ptr, dy_ptr, dx_ptr, K, N, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1)
    rows = tl.load(offsets_ptr + b) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(offsets_ptr + b) + tl.program_id(1) * BLOCK < end:
        dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            w = load_tile(w_ptr + b * K * N, k, cols, K, N)
            dy = load_tile(dy_ptr, rows, cols, end, N)
            dx = tl.dot(dy, tl.trans(w), dx, input_precision=PRECISION)
        store_tile(dx_ptr, dx, rows, k, end, K)


@triton.jit
def dw_kernel(x_ptr, offsets_ptr, dy_ptr, dw_ptr, dc_ptr, K, N, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + b), end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, rows, k, end, K)
        dy = load_tile(dy_ptr, rows, cols, end, N)
        dw = tl.dot(tl.trans(x), dy, dw, input_precision=PRECISION)
        dc += dy.to(tl.float32)
    store_tile(dw_ptr + b * K * N, dw, k, cols, K, N)
    if tl.program_id(1) == 0:
        tl.store(dc_ptr + b * N + cols, tl.sum(dc, axis=0).to(dc_ptr.dtype.element_ty), mask=cols < N)


class JaggedBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, c, offsets, longest):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w, offsets)
        ctx.longest, ctx.c_dtype = longest, c.dtype
        return jagged_bmm(x, w, c, offsets, longest)

    @staticmethod
    def backward(ctx, dy):
        x, w, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        B, K, N = w.shape
        tiles = tiles_of(x)
        deep, across = triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"])
        needs = ctx.needs_input_grad
        dx = dw = dc = None
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (B, triton.cdiv(ctx.longest, tiles["BLOCK"]), deep)
            dx_kernel[grid](w, offsets, dy, dx, K, N, **tiles)
        if needs[1] or needs[2]:
            dw, dc = torch.empty_like(w), torch.empty((B, N), device=x.device, dtype=ctx.c_dtype)
            dw_kernel[(B, max(1, deep), across)](x, offsets, dy, dw, dc, K, N, **tiles)
        return dx, dw if needs[1] else None, dc if needs[2] else None, None, None


def jagged_bmm_autograd(x, w, c, offsets, longest):
    return JaggedBmm.apply(x, w, c, offsets, longest)
