"""Product with a band matrix, stored by its diagonals: a local mixing of positions with free weights.

Forward    y_i = sum over d = 0..2b of a_id x_{i + d - b},  rows of x outside 0..n-1 are zero;  a (n, 2b + 1)
Backward   with j = i + d - b:  dx_j = sum_d a_{j - d + b, d} dy_{j - d + b},   da_id = <dy_i, x_{i + d - b}>,
           and 0 where i + d - b is outside

Forward schedule: a program owns (tile of rows, tile of columns) and walks the diagonals. Its rows of x slide
by one a step, so all but one of them are in the cache.
Backward schedule: the transpose of a band is a band, whose diagonals run the other way: dx's owner walks the
same d with the rows of a and dy shifted by b - d, a gather where the forward's programs would have scattered.
a is dense in memory, but a number a_id has one row i: da's owner is (tile of rows, diagonal), reduces over
the columns, and stores. The band has no more than a dot of two shifted tiles of rows for each of its 2b + 1
diagonals, so nothing dense in n is ever made.

op: banded_matmul
schedule: gather_transpose, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"ROWS": 32, "COLS": 64}


@triton.jit
def load_rows(ptr, i, c, N, C):
    mask = (i[:, None] >= 0) & (i[:, None] < N) & (c[None, :] < C)
    return tl.load(ptr + i[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_diagonal(a_ptr, i, d, N, width):
    return tl.load(a_ptr + i.to(tl.int64) * width + d, mask=(i >= 0) & (i < N), other=0.0).to(tl.float32)


@triton.jit
def band_kernel(
    a_ptr, x_ptr, y_ptr, N, C, width, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """y = A x, or A^T x."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    y = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for d in range(width):
        shift = d - width // 2
        if TRANSPOSED:
            y += load_diagonal(a_ptr, i - shift, d, N, width)[:, None] * load_rows(x_ptr, i - shift, c, N, C)
        else:
            y += load_diagonal(a_ptr, i, d, N, width)[:, None] * load_rows(x_ptr, i + shift, c, N, C)
    offs = i[:, None].to(tl.int64) * C + c[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=(i[:, None] < N) & (c[None, :] < C))


def multiply(a, x, transposed):
    (N, C), y = x.shape, torch.empty_like(x)
    grid = (triton.cdiv(N, BLOCKS["ROWS"]), triton.cdiv(C, BLOCKS["COLS"]))
    band_kernel[grid](a, x, y, N, C, a.shape[1], TRANSPOSED=transposed, **BLOCKS)
    return y


@autodiff(inputs_require_grad=(0, 1))
def band_matmul(a, x):
    """a: (n, 2 b + 1), a[i, d] the weight of row i + d - b for row i; x: (n, C)."""
    if a.shape[0] != x.shape[0] or a.shape[1] % 2 == 0:
        raise ValueError(f"a {tuple(a.shape)} is no band for the rows of {tuple(x.shape)}")
    return multiply(a.contiguous(), x.contiguous(), False)


def reference(a, x):
    n, width = a.shape
    padded = torch.nn.functional.pad(x, (0, 0, width // 2, width // 2))
    return sum(a[:, d, None] * padded[d : d + n] for d in range(width))


SWEEP = [{"n": 65536, "b": 8, "C": 512}, {"n": 10007, "b": 31, "C": 200}]
SWEEP_CPU = [{"n": 53, "b": 3, "C": 17}, {"n": 20, "b": 12, "C": 80}]


def make_args(dims, device="cuda", dtype=torch.float32):
    n, width = dims["n"], 2 * dims["b"] + 1
    a = torch.randn(n, width, device=device, dtype=dtype) / width**0.5
    return a, torch.randn(n, dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def da_kernel(x_ptr, dy_ptr, da_ptr, N, C, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    i, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, C, COLS):
        c = start + tl.arange(0, COLS)
        total += tl.sum(load_rows(dy_ptr, i, c, N, C) * load_rows(x_ptr, i + d - width // 2, c, N, C), axis=1)
    tl.store(da_ptr + i.to(tl.int64) * width + d, total.to(da_ptr.dtype.element_ty), mask=i < N)


class BandMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        a, x = a.contiguous(), x.contiguous()
        ctx.save_for_backward(a, x)
        return multiply(a, x, False)

    @staticmethod
    def backward(ctx, dy):
        a, x = ctx.saved_tensors
        dy, da, dx = dy.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            grid = (triton.cdiv(x.shape[0], BLOCKS["ROWS"]), a.shape[1])
            da_kernel[grid](x, dy, da, *x.shape, a.shape[1], **BLOCKS)
        if ctx.needs_input_grad[1]:
            dx = multiply(a, dy, True)
        return da, dx


def band_matmul_autograd(a, x):
    return BandMatmul.apply(a, x)
