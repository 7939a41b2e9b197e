"""Euclidean distances between two sets of vectors.

Forward    q_ij = |x_i|^2 + |y_j|^2 - 2 <x_i, y_j>,  d_ij = sqrt(q_ij), and 0 where rounding leaves q_ij <= 0
Backward   dd_ij/dx_i = (x_i - y_j) / d_ij;  with w_ij = dd_ij / d_ij, and 0 where d_ij = 0:
           dx_i = (sum_j w_ij) x_i - sum_j w_ij y_j,   dy_j = (sum_i w_ij) y_j - sum_i w_ij x_i

Forward schedule: a program owns a tile of d and walks the features: one product, with both squared lengths
summed from the tiles that pass by.
Backward schedule: a tile of w is needed twice, by the owners of its rows and by those of its columns. Both
are the same kernel with the strides of d exchanged: the owner of a tile of one set walks the other set and
reads d and dd, for which nothing has to be rebuilt. The difference x_i - y_j is split: the part of x_i is a
row sum, the part of y_j a product, so the walk is a matrix product and no (i, j, feature) numbers exist.

op: cdist
schedule: swap_owner, recompute_from_stats
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def dot_precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def cdist_kernel(x_ptr, y_ptr, d_ptr, M, N, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    x_square = tl.zeros([BLOCK], dtype=tl.float32)
    y_square = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        x, y = load_tile(x_ptr, i, feature, M, D), load_tile(y_ptr, j, feature, N, D)
        product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
        x_square += tl.sum(x * x, axis=1)
        y_square += tl.sum(y * y, axis=1)
    q = x_square[:, None] + y_square[None, :] - 2 * product
    d = tl.where(q > 0, tl.sqrt(tl.where(q > 0, q, 1.0)), 0.0)
    mask = (i[:, None] < M) & (j[None, :] < N)
    tl.store(d_ptr + i[:, None].to(tl.int64) * N + j[None, :], d, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def cdist(x, y):
    """x: (M, D), y: (N, D), float32; gives (M, N)."""
    if x.shape[1] != y.shape[1]:
        raise ValueError("x and y must have the same features")
    x, y = x.contiguous(), y.contiguous()
    (M, D), N = x.shape, y.shape[0]
    d = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    cdist_kernel[grid](x, y, d, M, N, D, PRECISION=dot_precision(), BLOCK=32)
    return d


def reference(x, y):
    q = x.pow(2).sum(1)[:, None] + y.pow(2).sum(1) - 2 * x @ y.t()
    return torch.where(q > 0, torch.where(q > 0, q, 1.0).sqrt(), 0.0)


SWEEP = [{"M": 4096, "N": 4096, "D": 128}, {"M": 8191, "N": 1000, "D": 65}]
SWEEP_CPU = [{"M": 35, "N": 44, "D": 16}, {"M": 70, "N": 9, "D": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], dims["D"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def own_gradient_kernel(
    own_ptr, other_ptr, d_ptr, dd_ptr, grad_ptr, M, N, D, own_stride, other_stride,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of M vectors from their distances to N others; d[own, other] has the two strides."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    pulled = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = (i[:, None] < M) & (j[None, :] < N)
        offs = i[:, None].to(tl.int64) * own_stride + j[None, :].to(tl.int64) * other_stride
        d = tl.load(d_ptr + offs, mask=mask, other=0.0)
        dd = tl.load(dd_ptr + offs, mask=mask, other=0.0)
        w = tl.where(d > 0, dd / tl.where(d > 0, d, 1.0), 0.0)
        total += tl.sum(w, axis=1)
        pulled = tl.dot(w, load_tile(other_ptr, j, feature, N, D), pulled, input_precision=PRECISION)
    grad = total[:, None] * load_tile(own_ptr, i, feature, M, D) - pulled
    mask = (i[:, None] < M) & (feature[None, :] < D)
    tl.store(grad_ptr + i[:, None].to(tl.int64) * D + feature[None, :], grad, mask=mask)


class Cdist(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        d = cdist(x, y)
        ctx.save_for_backward(x, y, d)
        return d

    @staticmethod
    def backward(ctx, dd):
        x, y, d = ctx.saved_tensors
        dd = dd.contiguous()
        (M, D), N = x.shape, y.shape[0]
        tiles = {"PRECISION": dot_precision(), "BLOCK": 32, "BLOCK_D": 64}
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, 32), triton.cdiv(D, 64))
            own_gradient_kernel[grid](x, y, d, dd, dx, M, N, D, N, 1, **tiles)
        if ctx.needs_input_grad[1]:
            dy = torch.empty_like(y)
            grid = (triton.cdiv(N, 32), triton.cdiv(D, 64))
            own_gradient_kernel[grid](y, x, d, dd, dy, N, M, D, 1, N, **tiles)
        return dx, dy


def cdist_autograd(x, y):
    return Cdist.apply(x, y)
