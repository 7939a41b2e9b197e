"""Gated linear unit of a packed projection, with the projection's bias (Conformer's convolution module).

Forward    x (M, 2 N), c (2 N):  u = x_j + c_j,  v = x_{N+j} + c_{N+j},  y_j = u s(v),  s the sigmoid
Backward   du = dy s(v),  dv = dy u s(v) s(-v);  dx is (du, dv) in x's places, dc their sums over the rows

Forward schedule: tiles of rows by columns of y; each reads two tiles of x, N columns apart.
Backward schedule: a program owns (row block, column tile of y) and walks its rows with two vectors of column
sums. The bias costs nothing more: du and dv are in registers as they are stored, and a program leaves one row
of partials, both halves of it. A second kernel adds the partials of a column, in a fixed order; blocks are as
long as still fill the device, so that partials are few. y is not kept: u and v are wanted in any case, and
give it back.

op: glu_bias
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_half(x_ptr, c_ptr, rows, cols, M, N, shift):
    """A tile of the half of x + c that begins at column `shift`, in fp32."""
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * 2 * N + shift + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(c_ptr + shift + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def glu_bias_kernel(x_ptr, c_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    u = load_half(x_ptr, c_ptr, rows, cols, M, N, 0)
    v = load_half(x_ptr, c_ptr, rows, cols, M, N, N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    y = (u * tl.sigmoid(v)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def glu_bias(x, c):
    """x: (M, 2 N); c: (2 N); gives (M, N)."""
    M, both = x.shape
    if both % 2 or c.shape != (both,):
        raise ValueError("x is (M, 2 N) and c (2 N)")
    y = torch.empty((M, both // 2), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 16), triton.cdiv(both // 2, 64))
    glu_bias_kernel[grid](x.contiguous(), c.contiguous(), y, M, both // 2, BLOCK_M=16, BLOCK_N=64)
    return y


def reference(x, c):
    return torch.nn.functional.glu(x + c, dim=-1)


SWEEP = [{"M": 65536, "N": 512}, {"M": 30011, "N": 1001}]
SWEEP_CPU = [{"M": 70, "N": 35}, {"M": 9, "N": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x = torch.randn(M, 2 * N, device=device, dtype=dtype)
    return x, torch.randn(2 * N, device=device, dtype=dtype)


# ---- backward ----

PROGRAMS = 1024  # a few for each multiprocessor


@triton.jit
def glu_backward_kernel(
    x_ptr, c_ptr, dy_ptr, dx_ptr, part_ptr, M, N, per_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_u = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sum_v = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(per_block):
        rows = (block * per_block + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        u = load_half(x_ptr, c_ptr, rows, cols, M, N, 0)
        v = load_half(x_ptr, c_ptr, rows, cols, M, N, N)
        dy = tl.load(dy_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        du = dy * tl.sigmoid(v)
        dv = du * u * tl.sigmoid(-v)
        offs = rows[:, None] * 2 * N + cols[None, :]
        tl.store(dx_ptr + offs, du.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + offs + N, dv.to(dx_ptr.dtype.element_ty), mask=mask)
        sum_u += du
        sum_v += dv
    slot = part_ptr + block * 2 * N + cols
    tl.store(slot, tl.sum(sum_u, axis=0), mask=cols < N)
    tl.store(slot + N, tl.sum(sum_v, axis=0), mask=cols < N)


@triton.jit
def bias_kernel(part_ptr, dc_ptr, blocks, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, blocks, BLOCK_G):
        i = start + tl.arange(0, BLOCK_G)
        mask = (i[:, None] < blocks) & (cols[None, :] < N)
        total += tl.load(part_ptr + i[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dc_ptr + cols, tl.sum(total, axis=0).to(dc_ptr.dtype.element_ty), mask=cols < N)


class GLUBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c):
        x, c = x.contiguous(), c.contiguous()
        ctx.save_for_backward(x, c)
        return glu_bias(x, c)

    @staticmethod
    def backward(ctx, dy):
        x, c = ctx.saved_tensors
        M, N = x.shape[0], x.shape[1] // 2
        dx, dc = torch.empty_like(x), None
        tiles, columns = triton.cdiv(M, 16), triton.cdiv(N, 64)
        per_block = max(1, triton.cdiv(tiles * columns, PROGRAMS))
        blocks = triton.cdiv(tiles, per_block)
        part = torch.empty((blocks, 2 * N), device=x.device, dtype=torch.float32)
        glu_backward_kernel[(blocks, columns)](
            x, c, dy.contiguous(), dx, part, M, N, per_block, BLOCK_M=16, BLOCK_N=64
        )
        if ctx.needs_input_grad[1]:
            dc = torch.empty_like(c)
            bias_kernel[(triton.cdiv(2 * N, 64),)](part, dc, blocks, 2 * N, BLOCK_G=16, BLOCK_N=64)
        return dx if ctx.needs_input_grad[0] else None, dc


def glu_bias_autograd(x, c):
    return GLUBias.apply(x, c)
