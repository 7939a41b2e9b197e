"""Chosen columns of each row: log-probabilities of sampled tokens, scores of the candidates kept.

Forward    y[m, j] = x[m, idx[m, j]],  J indices a row, which may repeat
Backward   dx[m, n] = sum over j with idx[m, j] = n of dy[m, j]

Forward schedule: a program owns a tile of rows and of the J outputs.
Backward schedule: a row's indices concern that row alone, so the owner of (tile of rows, tile of columns)
need not know where others point: it walks the few indices of its rows, compares each with its columns and
adds dy where they agree. That stores every dx once, the many zeros among them, repeated indices are summed in
registers in a fixed order, and neither a zero fill nor atomics are left. It costs J comparisons a column,
which hides behind the store for J up to a few dozen.

op: gather_dim
schedule: index_or_seed_replay, swap_owner
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gather_kernel(x_ptr, idx_ptr, y_ptr, M, N, J, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    mask = (m < M) & (j < J)
    n = tl.load(idx_ptr + m * J + j, mask=mask, other=0)
    tl.store(y_ptr + m * J + j, tl.load(x_ptr + m * N + n, mask=mask, other=0.0), mask=mask)


@autodiff(inputs_require_grad=(0,))
def gather_columns(x, idx):
    """x: (M, N); idx: int64 (M, J), from 0 to N - 1."""
    (M, N), J = x.shape, idx.shape[1]
    y = torch.empty((M, J), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 16), triton.cdiv(J, 16))
    gather_kernel[grid](x.contiguous(), idx.contiguous(), y, M, N, J, BLOCK_M=16, BLOCK_J=16)
    return y


def reference(x, idx):
    return x.gather(1, idx)


SWEEP = [{"M": 2048, "N": 32000, "J": 8}, {"M": 4099, "N": 5003, "J": 30}]
SWEEP_CPU = [{"M": 23, "N": 30, "J": 12}, {"M": 5, "N": 290, "J": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N, J = dims["M"], dims["N"], dims["J"]
    x = torch.randn(M, N, device=device, dtype=dtype)
    return x, torch.randint(0, N, (M, J), device=device)


# ---- backward ----


@triton.jit
def gather_backward_kernel(
    idx_ptr, dy_ptr, dx_ptr, M, N, J, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dx = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for j in range(J):
        chosen = tl.load(idx_ptr + m * J + j, mask=m < M, other=-1)
        dy = tl.load(dy_ptr + m * J + j, mask=m < M, other=0.0).to(tl.float32)
        dx += tl.where(chosen[:, None] == n[None, :], dy[:, None], 0.0)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(dx_ptr + m[:, None] * N + n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, idx):
        idx = idx.contiguous()
        ctx.save_for_backward(idx)
        ctx.N = x.shape[1]
        return gather_columns(x, idx)

    @staticmethod
    def backward(ctx, dy):
        (idx,) = ctx.saved_tensors
        (M, J), N = idx.shape, ctx.N
        dx = torch.empty((M, N), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(M, 4), triton.cdiv(N, 256))
        gather_backward_kernel[grid](idx, dy.contiguous(), dx, M, N, J, BLOCK_M=4, BLOCK_N=256)
        return dx, None


def gather_columns_autograd(x, idx):
    return GatherColumns.apply(x, idx)
