"""Inverses of unit lower triangular matrices: the triangular factor of the delta rule's chunks.

Forward    T = (I + A)^{-1}, A strictly lower triangular:  T_i = e_i - sum_{k < i} A_ik T_k, row by row
Backward   (I + A) T = I gives dT = -T dA T as differentials, so for gradients  dA = -strict_tril(T^T dT T^T)

Forward schedule: a program owns a matrix; T grows in registers, a row of A is read a step.
Backward schedule: the adjoint of a solve is a transposed solve, but here the solution is the inverse itself,
so the output does what a solve would: two products of T, which is all that is saved, and none of the n
dependent steps. On a GPU a step is a latency, a product of two small tiles is nearly free. dT counts in full:
T's zeros above the diagonal are constants, so their upstream is dropped before the products, and after them
what lies on and above the diagonal, as A has nothing there.

op: unit_lower_inverse
schedule: adjoint_solve
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
def inverse_kernel(a_ptr, t_ptr, n, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * n * n
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    T = tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    for k in range(1, n):
        a = tl.load(a_ptr + matrix + k * n + i, mask=i < k, other=0.0)
        row = tl.sum(a[:, None] * T, axis=0)
        T = tl.where(i[:, None] == k, T - row[None, :], T)
    mask = (i[:, None] < n) & (j[None, :] < n)
    tl.store(
        t_ptr + matrix + i[:, None] * n + j[None, :], tl.where(i[:, None] < j[None, :], 0.0, T), mask=mask
    )


def tiling(a):
    n = a.shape[-1]
    if a.shape[-2] != n or not 1 <= n <= 128:
        raise ValueError(f"matrices {tuple(a.shape[-2:])}: need square ones of at most 128 rows")
    BLOCK = max(16, triton.next_power_of_2(n))
    return {"BLOCK": BLOCK, "num_warps": 8 if BLOCK > 64 else 4}


@autodiff(inputs_require_grad=(0,))
def unit_lower_inverse(a):
    """a: (..., n, n), float32; only what is below the diagonal is read."""
    a, tiles = a.contiguous(), tiling(a)
    n, t = a.shape[-1], torch.empty_like(a)
    inverse_kernel[(a.numel() // (n * n),)](a, t, n, **tiles)
    return t


def reference(a):
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    return torch.linalg.solve_triangular(eye + a.tril(-1), eye.expand_as(a), upper=False, unitriangular=True)


SWEEP = [{"B": 8, "chunks": 512, "n": 64}, {"B": 3, "chunks": 1021, "n": 45}]
SWEEP_CPU = [{"B": 1, "chunks": 5, "n": 32}, {"B": 2, "chunks": 3, "n": 19}]


def make_args(dims, device="cuda", dtype=torch.float32):
    n = dims["n"]
    a = torch.randn(dims["B"], dims["chunks"], n, n, device=device, dtype=dtype)
    return (a / max(1, n) ** 0.5,)


# ---- backward ----


@triton.jit
def inverse_backward_kernel(t_ptr, dt_ptr, da_ptr, n, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * n * n
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    offs = matrix + i[:, None] * n + j[None, :]
    lower = (i[:, None] < n) & (j[None, :] <= i[:, None])
    T_t = tl.trans(tl.load(t_ptr + offs, mask=lower, other=0.0))
    dT = tl.load(dt_ptr + offs, mask=lower, other=0.0)
    left = tl.dot(T_t, dT, input_precision=PRECISION)
    dA = -tl.dot(left, T_t, input_precision=PRECISION)
    mask = (i[:, None] < n) & (j[None, :] < n)
    tl.store(da_ptr + offs, tl.where(i[:, None] > j[None, :], dA, 0.0), mask=mask)


class UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        t = unit_lower_inverse(a)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, dt):
        (t,) = ctx.saved_tensors
        n, da = t.shape[-1], torch.empty_like(t)
        grid = (t.numel() // (n * n),)
        inverse_backward_kernel[grid](t, dt.contiguous(), da, n, PRECISION=dot_precision(), **tiling(t))
        return da


def unit_lower_inverse_autograd(a):
    return UnitLowerInverse.apply(a)
