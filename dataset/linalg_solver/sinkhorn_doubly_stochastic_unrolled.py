"""Sinkhorn normalisation: K rounds that scale the rows and columns of exp(x) to sums of one.

Forward    g^0 = 0;  f^k_i = -log sum_j exp(x_ij + g^{k-1}_j),   g^k_j = -log sum_i exp(x_ij + f^k_i);
           P_ij = exp(x_ij + f^K_i + g^K_j)
Backward   S = dP P,  df_i = sum_j S_ij,  dg_j = sum_i S_ij,
           dx = S. Then for k = K .. 1, each half step undone:
           C_ij = exp(x_ij + f^k_i + g^k_j):       dx -= C dg_j,   df_i -= sum_j C_ij dg_j;
           R_ij = exp(x_ij + f^k_i + g^{k-1}_j):   dx -= R df_i,   dg_j = -sum_i R_ij df_i,   df = 0,
           since C and R are the softmaxes whose logarithms the half steps take

Forward schedule: the matrices are small (experts, streams of a residual, matched points) and many, so a
program owns a few, whole, in registers. Each round stores its f and g: 2 n numbers where a matrix has n^2.
Backward schedule: the same owner walks the rounds in reverse. A matrix of a half step is rebuilt from x and
two saved vectors by one exponential, so the 2 K matrices that autograd would keep are never stored, and dx is
summed in registers and stored once. The iteration is differentiated as it is, after K rounds and not at its
limit.

op: sinkhorn
schedule: adjoint_solve, recompute_from_stats, reverse_scan
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def places(B, N, M, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    i, j = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    rows = (b[:, None] < B) & (i[None, :] < N)
    columns = (b[:, None] < B) & (j[None, :] < M)
    return b, i, j, rows, columns


@triton.jit
def minus_log_sum(v, axis: tl.constexpr, mask):
    m = tl.max(v, axis=axis)
    total = tl.sum(tl.exp(v - tl.expand_dims(m, axis)), axis=axis)
    return tl.where(mask, -m - tl.log(total), 0.0)


@triton.jit
def sinkhorn_kernel(
    x_ptr, p_ptr, f_ptr, g_ptr, B, N, M, K,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    b, i, j, rows, columns = places(B, N, M, BLOCK_B, BLOCK_N, BLOCK_M)
    mask = rows[:, :, None] & columns[:, None, :]
    offs = (b[:, None, None] * N + i[None, :, None]) * M + j[None, None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=-1e30)
    f = tl.zeros([BLOCK_B, BLOCK_N], dtype=tl.float32)
    g = tl.zeros([BLOCK_B, BLOCK_M], dtype=tl.float32)
    for k in range(K):
        f = minus_log_sum(x + g[:, None, :], 2, rows)
        g = minus_log_sum(x + f[:, :, None], 1, columns)
        tl.store(f_ptr + (b[:, None] * K + k) * N + i[None, :], f, mask=rows)
        tl.store(g_ptr + (b[:, None] * K + k) * M + j[None, :], g, mask=columns)
    tl.store(p_ptr + offs, tl.exp(x + f[:, :, None] + g[:, None, :]), mask=mask)


def tiling(x):
    N, M = x.shape[1:]
    if N < 1 or M < 1 or max(N, M) > 64:
        raise ValueError(f"matrices of {N} x {M}: at most 64 x 64 fit in registers")
    BLOCK_N, BLOCK_M = triton.next_power_of_2(N), triton.next_power_of_2(M)
    return {"BLOCK_B": max(1, 1024 // (BLOCK_N * BLOCK_M)), "BLOCK_N": BLOCK_N, "BLOCK_M": BLOCK_M}


def sinkhorn_forward(x, rounds):
    if rounds < 1:
        raise ValueError("need a round or more")
    (B, N, M), tiles, p = x.shape, tiling(x), torch.empty_like(x)
    f, g = (torch.empty((B, rounds, n), device=x.device, dtype=torch.float32) for n in (N, M))
    sinkhorn_kernel[(triton.cdiv(B, tiles["BLOCK_B"]),)](x, p, f, g, B, N, M, rounds, **tiles)
    return p, f, g


@autodiff(inputs_require_grad=(0,))
def sinkhorn(x, rounds=6):
    """x: (B, N, M), float32; square matrices become doubly stochastic, others get columns of sum one."""
    return sinkhorn_forward(x.contiguous(), rounds)[0]


def reference(x, rounds=6):
    for _ in range(rounds):
        x = x - x.logsumexp(2, keepdim=True)
        x = x - x.logsumexp(1, keepdim=True)
    return x.exp()


SWEEP = [{"B": 131072, "n": 4, "m": 4}, {"B": 8191, "n": 45, "m": 33}]
SWEEP_CPU = [{"B": 9, "n": 13, "m": 13}, {"B": 70, "n": 4, "m": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["n"], dims["m"], device=device, dtype=dtype),), {"rounds": 5}


# ---- backward ----


@triton.jit
def sinkhorn_backward_kernel(
    x_ptr, f_ptr, g_ptr, dp_ptr, dx_ptr, B, N, M, K,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    b, i, j, rows, columns = places(B, N, M, BLOCK_B, BLOCK_N, BLOCK_M)
    mask = rows[:, :, None] & columns[:, None, :]
    offs = (b[:, None, None] * N + i[None, :, None]) * M + j[None, None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=-1e30)
    g = tl.load(g_ptr + (b[:, None] * K + K - 1) * M + j[None, :], mask=columns, other=0.0)
    f = tl.load(f_ptr + (b[:, None] * K + K - 1) * N + i[None, :], mask=rows, other=0.0)
    C = tl.exp(x + f[:, :, None] + g[:, None, :])
    dx = C * tl.load(dp_ptr + offs, mask=mask, other=0.0)
    df, dg = tl.sum(dx, axis=2), tl.sum(dx, axis=1)
    for step in range(K):
        k = K - 1 - step
        f = tl.load(f_ptr + (b[:, None] * K + k) * N + i[None, :], mask=rows, other=0.0)
        pulled = tl.exp(x + f[:, :, None] + g[:, None, :]) * dg[:, None, :]
        dx -= pulled
        df -= tl.sum(pulled, axis=2)
        g = tl.load(g_ptr + (b[:, None] * K + k - 1) * M + j[None, :], mask=columns & (k > 0), other=0.0)
        pulled = tl.exp(x + f[:, :, None] + g[:, None, :]) * df[:, :, None]
        dx -= pulled
        dg = -tl.sum(pulled, axis=1)
        df = tl.zeros([BLOCK_B, BLOCK_N], dtype=tl.float32)
    tl.store(dx_ptr + offs, dx, mask=mask)


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounds):
        x = x.contiguous()
        p, f, g = sinkhorn_forward(x, rounds)
        ctx.save_for_backward(x, f, g)
        return p

    @staticmethod
    def backward(ctx, dp):
        x, f, g = ctx.saved_tensors
        (B, N, M), tiles, dx = x.shape, tiling(x), torch.empty_like(x)
        sinkhorn_backward_kernel[(triton.cdiv(B, tiles["BLOCK_B"]),)](
            x, f, g, dp.contiguous(), dx, B, N, M, f.shape[1], **tiles
        )
        return dx, None


def sinkhorn_autograd(x, rounds=6):
    return Sinkhorn.apply(x, rounds)
