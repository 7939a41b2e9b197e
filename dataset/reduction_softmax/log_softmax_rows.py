"""Log-softmax over short rows, many of them in one program.

Forward    y_j = x_j - lse,  lse = m + log sum_k exp(x_k - m),  m = max_k x_k
Backward   dy_i/dx_j = [i = j] - p_j with p = exp(y), so dx_j = dy_j - exp(y_j) sum_i dy_i

Forward schedule: a program owns a tile of whole rows. A row of ten or a hundred classes would leave most of
a program idle, so the tile holds about 4096 numbers, of as many rows as that gives.
Backward schedule: the same tiles. The saved output is the logarithm of the softmax, so the row's one sum is
of dy alone and neither x, its maximum nor its lse is wanted. Both y and dy are read once: the sum and the
correction happen in registers. Lanes beyond N count 0 in the sum and are not stored.

op: log_softmax
schedule: row_reduce_correct
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


MAX_N = 32768


def tile_of(N):
    """Rows and columns of a tile that holds rows of N whole."""
    if N > MAX_N:
        raise ValueError(f"a row of {N} does not fit one tile")
    BLOCK_N = triton.next_power_of_2(N)
    return {"BLOCK_M": max(1, 4096 // BLOCK_N), "BLOCK_N": BLOCK_N}


@triton.jit
def log_softmax_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    offs = rows[:, None] * N + cols[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    m = tl.max(tl.where(cols[None, :] < N, x, -float("inf")), axis=1)
    centred = x - m[:, None]
    lse = tl.log(tl.sum(tl.where(cols[None, :] < N, tl.exp(centred), 0.0), axis=1))
    tl.store(y_ptr + offs, (centred - lse[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def log_softmax(x):
    """x: (..., N)."""
    x = x.contiguous()
    N = x.shape[-1]
    M = x.numel() // N
    tile = tile_of(N)
    y = torch.empty_like(x)
    log_softmax_kernel[(triton.cdiv(M, tile["BLOCK_M"]),)](x, y, M, N, **tile)
    return y


def reference(x):
    return torch.log_softmax(x, dim=-1)


SWEEP = [{"M": 131072, "N": 100}, {"M": 16383, "N": 1000}]
SWEEP_CPU = [{"M": 67, "N": 65}, {"M": 3, "N": 5000}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def log_softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    offs = rows[:, None] * N + cols[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = dy - tl.exp(y) * tl.sum(dy, axis=1)[:, None]
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = log_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        N = y.shape[-1]
        M = y.numel() // N
        tile = tile_of(N)
        dx = torch.empty_like(y)
        grid = (triton.cdiv(M, tile["BLOCK_M"]),)
        log_softmax_backward_kernel[grid](y, dy.contiguous(), dx, M, N, **tile)
        return dx


def log_softmax_autograd(x):
    return LogSoftmax.apply(x)
