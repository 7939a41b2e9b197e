"""City-block distances between two sets of vectors.

Forward    d_ij = sum_f |x_if - y_jf|
Backward   dx_if = sum_j sign(x_if - y_jf) dd_ij,  dy_jf = sum_i sign(y_jf - x_if) dd_ij,  sign(0) = 0

Forward schedule: a program owns a tile of d and walks the features, a few at a time: |x - y| is no product,
so a tile (i, j, feature) of differences is made in registers and summed over its features.
Backward schedule: a sign is no product either, and it depends on all three indices, so nothing of the forward
is worth saving: it is one comparison of two numbers that have to be read anyway. The gradients differ in what
they sum over: the owner of (i, feature) walks j, the owner of (j, feature) walks i. One kernel serves both,
with the strides of dd exchanged; since sign is odd, "own minus other" is right on both sides.

op: cdist_l1
schedule: swap_owner
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def cdist_l1_kernel(x_ptr, y_ptr, d_ptr, M, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        feature = start + tl.arange(0, BLOCK_D)  # features past D are 0 in both, and so is their difference
        x, y = load_tile(x_ptr, i, feature, M, D), load_tile(y_ptr, j, feature, N, D)
        d += tl.sum(tl.abs(x[:, None, :] - y[None, :, :]), axis=2)
    mask = (i[:, None] < M) & (j[None, :] < N)
    tl.store(d_ptr + i[:, None].to(tl.int64) * N + j[None, :], d, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def cdist_l1(x, y):
    """x: (M, D), y: (N, D), float32; gives (M, N)."""
    if x.shape[1] != y.shape[1]:
        raise ValueError("x and y must have the same features")
    x, y = x.contiguous(), y.contiguous()
    (M, D), N = x.shape, y.shape[0]
    d = torch.empty((M, N), device=x.device, dtype=x.dtype)
    cdist_l1_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](x, y, d, M, N, D, BLOCK=32, BLOCK_D=8)
    return d


def reference(x, y):
    return (x[:, None, :] - y).abs().sum(-1)


SWEEP = [{"M": 1024, "N": 1024, "D": 256}, {"M": 2039, "N": 500, "D": 65}]
SWEEP_CPU = [{"M": 29, "N": 33, "D": 12}, {"M": 60, "N": 7, "D": 19}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], dims["D"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def own_gradient_kernel(
    own_ptr, other_ptr, dd_ptr, grad_ptr, M, N, D, own_stride, other_stride,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of M vectors from their distances to N others; dd[own, other] has the two strides."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    own = load_tile(own_ptr, i, feature, M, D)
    grad = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = load_tile(other_ptr, j, feature, N, D)
        offs = i[:, None].to(tl.int64) * own_stride + j[None, :].to(tl.int64) * other_stride
        dd = tl.load(dd_ptr + offs, mask=(i[:, None] < M) & (j[None, :] < N), other=0.0)
        above = own[:, None, :] > other[None, :, :]
        below = own[:, None, :] < other[None, :, :]
        signed = tl.where(above, dd[:, :, None], 0.0) - tl.where(below, dd[:, :, None], 0.0)
        grad += tl.sum(signed, axis=1)
    mask = (i[:, None] < M) & (feature[None, :] < D)
    tl.store(grad_ptr + i[:, None].to(tl.int64) * D + feature[None, :], grad, mask=mask)


class CdistL1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        return cdist_l1(x, y)

    @staticmethod
    def backward(ctx, dd):
        x, y = ctx.saved_tensors
        dd = dd.contiguous()
        (M, D), N = x.shape, y.shape[0]
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, 16), triton.cdiv(D, 32))
            own_gradient_kernel[grid](x, y, dd, dx, M, N, D, N, 1, BLOCK=16, BLOCK_D=32)
        if ctx.needs_input_grad[1]:
            dy = torch.empty_like(y)
            grid = (triton.cdiv(N, 16), triton.cdiv(D, 32))
            own_gradient_kernel[grid](y, x, dd, dy, N, M, D, 1, N, BLOCK=16, BLOCK_D=32)
        return dx, dy


def cdist_l1_autograd(x, y):
    return CdistL1.apply(x, y)
