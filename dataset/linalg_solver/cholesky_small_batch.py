"""Cholesky factors of many small matrices.

Forward    A = L L^T, L lower triangular; of A the lower triangle is read and stands for both
Backward   dA = dL L^T + L dL^T as differentials, so L^{-1} dA L^{-T} = L^{-1} dL + (L^{-1} dL)^T. The first
           term is lower triangular: it is Phi(L^{-1} dA L^{-T}), where Phi takes the lower triangle and
           halves the diagonal. Turned around, for gradients:  P = Phi(L^T dL),  S = L^{-T} P L^{-1}; a
           number below the diagonal stands for two:  dA_ij = S_ij + S_ji for i > j,  dA_ii = S_ii

Forward schedule: a program owns a matrix in registers and takes one column a step: a root, a division, and
the outer product of the column with itself off what remains.
Backward schedule: the steps could be walked in reverse, with an outer product each; the formula needs none of
them. One product, and two solves with the saved L: S^T = L^{-T} (L^{-T} P)^T, so that both are the same back
substitution, with a transposition in registers between. L is never inverted, A is not saved. The owner is the
forward's, and neither P nor S leaves the registers.

op: cholesky
schedule: adjoint_solve
difficulty: 4
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
def load_lower(ptr, i, j, n):
    """The lower triangle, zeros above it and outside."""
    mask = (i[:, None] < n) & (j[None, :] <= i[:, None])
    return tl.load(ptr + i[:, None] * n + j[None, :], mask=mask, other=0.0)


@triton.jit
def cholesky_kernel(a_ptr, l_ptr, n, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * n * n
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    rest = load_lower(a_ptr + matrix, i, j, n)
    L = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for k in range(n):
        column = tl.sum(tl.where(j[None, :] == k, rest, 0.0), axis=1)
        root = tl.sqrt(tl.sum(tl.where(i == k, column, 0.0), axis=0))
        column = tl.where(i < k, 0.0, column / root)
        L = tl.where(j[None, :] == k, column[:, None], L)
        row = tl.sum(tl.where(i[:, None] == j[None, :], column[:, None], 0.0), axis=0)
        rest -= tl.where(j[None, :] > k, column[:, None] * row[None, :], 0.0)
    mask = (i[:, None] < n) & (j[None, :] < n)
    tl.store(
        l_ptr + matrix + i[:, None] * n + j[None, :], tl.where(i[:, None] < j[None, :], 0.0, L), mask=mask
    )


def tiling(a):
    n = a.shape[1]
    if a.shape[2] != n or not 1 <= n <= 64:
        raise ValueError(f"matrices {tuple(a.shape[1:])}: need square ones of at most 64 rows")
    BLOCK = max(16, triton.next_power_of_2(n))
    return {"BLOCK": BLOCK, "num_warps": max(1, BLOCK * BLOCK // 512)}


@autodiff(inputs_require_grad=(0,))
def cholesky(a):
    """a: (matrices, n, n), float32, positive definite."""
    a, tiles = a.contiguous(), tiling(a)
    l = torch.empty_like(a)
    cholesky_kernel[(a.shape[0],)](a, l, a.shape[1], **tiles)
    return l


def reference(a):
    return torch.linalg.cholesky(a.tril() + a.tril(-1).transpose(1, 2))


SWEEP = [{"Bt": 65536, "n": 16}, {"Bt": 8191, "n": 45}]
SWEEP_CPU = [{"Bt": 7, "n": 12}, {"Bt": 3, "n": 19}]


def make_args(dims, device="cuda", dtype=torch.float32):
    Bt, n = dims["Bt"], dims["n"]
    g = torch.randn(Bt, n, n, device=device, dtype=dtype)
    return (g @ g.transpose(1, 2) / max(1, n) + torch.eye(n, device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def back_substituted(l_ptr, x, n, BLOCK: tl.constexpr):
    """L^{-T} x."""
    j = tl.arange(0, BLOCK)
    for step in range(n):
        i = n - 1 - step
        below = tl.load(l_ptr + j * n + i, mask=(j > i) & (j < n), other=0.0)
        known = tl.sum(below[:, None] * x, axis=0)  # rows above i are not solved yet
        x = tl.where(j[:, None] == i, (x - known[None, :]) / tl.load(l_ptr + i * n + i), x)
    return x


@triton.jit
def cholesky_backward_kernel(l_ptr, dl_ptr, da_ptr, n, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * n * n
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    L, dL = load_lower(l_ptr + matrix, i, j, n), load_lower(dl_ptr + matrix, i, j, n)
    P = tl.dot(tl.trans(L), dL, input_precision=PRECISION)
    P = tl.where(i[:, None] > j[None, :], P, tl.where(i[:, None] == j[None, :], 0.5 * P, 0.0))
    half_solved = back_substituted(l_ptr + matrix, P, n, BLOCK)
    S = back_substituted(l_ptr + matrix, tl.trans(half_solved), n, BLOCK)
    dA = tl.where(i[:, None] == j[None, :], S, S + tl.trans(S))
    mask = (i[:, None] < n) & (j[None, :] < n)
    dA = tl.where(i[:, None] < j[None, :], 0.0, dA)
    tl.store(da_ptr + matrix + i[:, None] * n + j[None, :], dA, mask=mask)


class Cholesky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        l = cholesky(a)
        ctx.save_for_backward(l)
        return l

    @staticmethod
    def backward(ctx, dl):
        (l,) = ctx.saved_tensors
        da = torch.empty_like(l)
        cholesky_backward_kernel[(l.shape[0],)](
            l, dl.contiguous(), da, l.shape[1], PRECISION=dot_precision(), **tiling(l)
        )
        return da


def cholesky_autograd(a):
    return Cholesky.apply(a)
