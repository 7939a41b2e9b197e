"""Hedgehog's feature map for linear attention: softmax of a row, beside softmax of its negative.

Forward    per row of N numbers:   p = softmax(x),   n = softmax(-x),   y = (p, n), a row of 2 N
Backward   with (u, w) the halves of dy:   dx = p * (u - <u, p>) - n * (w - <w, n>)

Forward schedule: a program owns a few whole rows, a head's features being short: 64 to 256 numbers. One load
of x serves both halves, whose maxima are max x and -min x.
Backward schedule: the same owner. Both halves come from y, so x is not kept; each is corrected by a row sum
of its own, and the two are combined before the only store, where two softmax backwards in turn would store a
gradient each and add them in a third pass. Rows are taken several at a time, so that a program has work
enough; all is reduced within a row, no two programs meet.

op: hedgehog_feature_map
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, rows, cols, M, N, stride, first):
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    return tl.load(ptr + rows[:, None] * stride + first + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, value, rows, cols, M, N, stride, first):
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    offs = rows[:, None] * stride + first + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_softmax(x, inside):
    x = tl.where(inside, x, -float("inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def feature_kernel(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (cols < N)[None, :]
    x = load_rows(x_ptr, rows, cols, M, N, N, 0)
    store_rows(y_ptr, row_softmax(x, inside), rows, cols, M, N, 2 * N, 0)
    store_rows(y_ptr, row_softmax(-x, inside), rows, cols, M, N, 2 * N, N)


def tiling(N):
    BLOCK = triton.next_power_of_2(N)
    return {"ROWS": max(1, 2048 // BLOCK), "BLOCK": BLOCK}


@autodiff(inputs_require_grad=(0,))
def hedgehog_features(x):
    """x: (..., N); gives (..., 2 N)."""
    x, N = x.contiguous(), x.shape[-1]
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty((*x.shape[:-1], 2 * N), device=x.device, dtype=x.dtype)
    M, tiles = x.numel() // N, tiling(N)
    feature_kernel[(triton.cdiv(M, tiles["ROWS"]),)](x, y, M, N, **tiles)
    return y


def reference(x):
    return torch.cat([torch.softmax(x, dim=-1), torch.softmax(-x, dim=-1)], dim=-1)


SWEEP = [{"B": 4, "H": 32, "T": 4096, "N": 64}, {"B": 1, "H": 12, "T": 2039, "N": 100}]
SWEEP_CPU = [{"B": 1, "H": 3, "T": 41, "N": 64}, {"B": 2, "H": 1, "T": 9, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn([dims[name] for name in ("B", "H", "T", "N")], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def feature_backward_kernel(y_ptr, dy_ptr, dx_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    p = load_rows(y_ptr, rows, cols, M, N, 2 * N, 0)
    n = load_rows(y_ptr, rows, cols, M, N, 2 * N, N)
    u = load_rows(dy_ptr, rows, cols, M, N, 2 * N, 0)
    w = load_rows(dy_ptr, rows, cols, M, N, 2 * N, N)
    dx = p * (u - tl.sum(u * p, axis=1)[:, None]) - n * (w - tl.sum(w * n, axis=1)[:, None])
    store_rows(dx_ptr, dx, rows, cols, M, N, N, 0)


class HedgehogFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = hedgehog_features(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        N = y.shape[-1] // 2
        dx = torch.empty((*y.shape[:-1], N), device=y.device, dtype=y.dtype)
        M, tiles = dx.numel() // N, tiling(N)
        feature_backward_kernel[(triton.cdiv(M, tiles["ROWS"]),)](y, dy.contiguous(), dx, M, N, **tiles)
        return dx


def hedgehog_features_autograd(x):
    return HedgehogFeatures.apply(x)
