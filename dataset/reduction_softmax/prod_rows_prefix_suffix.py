"""Product of every row, with a gradient that is right where a row has zeros.

Forward    y = x_1 x_2 ... x_N
Backward   dx_i = dy p_i s_i,   p_i = x_1 ... x_{i-1} and s_i = x_{i+1} ... x_N the products beside i

Forward schedule: a program owns a tile of rows, whole in registers, filled up with ones; the last lane of a
running product has it all.
Backward schedule: the same owner. y / x_i is the usual shortcut, and 0 / 0 in a row with a zero, though
exactly the zero has a gradient there; it also fails where y has run below the smallest number. p and s divide
by nothing: p is the running product of the row moved by one place to the right, s that of the row moved to
the left, from the other end. The moves are two loads with addresses one off, out of cache, and 1 where they
leave the row; both scans stay in registers, and y is not needed.

op: prod
schedule: reverse_scan
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(N):
    """Rows of one tile: a few thousand numbers together."""
    BLOCK_N = triton.next_power_of_2(N)
    return {"BLOCK_M": max(1, min(16, 2048 // BLOCK_N)), "BLOCK_N": BLOCK_N}


@triton.jit
def load_moved(x_ptr, m, n, M, N):
    """Rows m at places n, which may lie beside the row; 1 there."""
    mask = (m[:, None] < M) & (n[None, :] >= 0) & (n[None, :] < N)
    return tl.load(x_ptr + m[:, None] * N + n[None, :], mask=mask, other=1.0).to(tl.float32)


@triton.jit
def prod_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    running = tl.cumprod(load_moved(x_ptr, m, n, M, N), axis=1)
    y = tl.sum(tl.where(n[None, :] == BLOCK_N - 1, running, 0.0), axis=1)
    tl.store(y_ptr + m, y.to(y_ptr.dtype.element_ty), mask=m < M)


@autodiff(inputs_require_grad=(0,))
def prod_rows(x):
    """x: (M, N), N at most 4096; gives (M)."""
    x, (M, N) = x.contiguous(), x.shape
    if not 1 <= N <= 4096:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, tiles = torch.empty(M, device=x.device, dtype=x.dtype), tiling(N)
    prod_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, y, M, N, **tiles)
    return y


def reference(x):
    return x.prod(dim=1)


SWEEP = [{"M": 262144, "N": 64}, {"M": 65537, "N": 200}]
SWEEP_CPU = [{"M": 25, "N": 22}, {"M": 40, "N": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 1 + 0.1 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    x[::3, dims["N"] // 2] = 0
    return (x,)


# ---- backward ----


@triton.jit
def prod_backward_kernel(x_ptr, dy_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    p = tl.cumprod(load_moved(x_ptr, m, n - 1, M, N), axis=1)
    s = tl.cumprod(load_moved(x_ptr, m, n + 1, M, N), axis=1, reverse=True)
    dy = tl.load(dy_ptr + m, mask=m < M, other=0.0).to(tl.float32)
    dx = dy[:, None] * p * s
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(dx_ptr + m[:, None] * N + n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class ProdRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return prod_rows(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        (M, N), tiles, dx = x.shape, tiling(x.shape[1]), torch.empty_like(x)
        prod_backward_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, dy.contiguous(), dx, M, N, **tiles)
        return dx


def prod_rows_autograd(x):
    return ProdRows.apply(x)
