"""Solution of lower triangular systems with many right-hand sides.

Forward    X = L^{-1} B
Backward   dB = L^{-T} dX;   from L X = B:  dL = -tril(dB X^T), summed over the right-hand sides

Forward schedule: a program owns (system, tile of right-hand sides), keeps its columns of X in registers and
substitutes forward, one row of L a step.
Backward schedule: the transposed system is solved by the same owner with back substitution, one column of L
a step; L is never inverted. dL sums over all columns: each tile's owner makes its share by one dot of the
dB and X that it holds, stores it in a slot, and a second kernel adds the slots and drops the upper
triangle.

op: triangular_solve
schedule: adjoint_solve, partials_then_reduce
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
def solve_kernel(l_ptr, b_ptr, x_ptr, n, R, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    system = tl.program_id(0).to(tl.int64)
    rhs = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_N)
    mask = (j[:, None] < n) & (rhs[None, :] < R)
    offs = (system * n + j[:, None]) * R + rhs[None, :]
    x = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    for i in range(n):
        row = tl.load(l_ptr + (system * n + i) * n + j, mask=j < i, other=0.0).to(tl.float32)
        pivot = tl.load(l_ptr + (system * n + i) * n + i).to(tl.float32)
        known = tl.sum(row[:, None] * x, axis=0)  # rows below i still hold b
        x = tl.where(j[:, None] == i, (x - known[None, :]) / pivot, x)
    tl.store(x_ptr + offs, x, mask=mask)


def check_shapes(L, B):
    if L.shape[1] != L.shape[2] or L.shape[:2] != B.shape[:2]:
        raise ValueError(f"L {tuple(L.shape)} and B {tuple(B.shape)} do not fit")
    if L.shape[1] > 64:
        raise ValueError(f"a system of {L.shape[1]} unknowns does not fit in registers")


@autodiff(inputs_require_grad=(0, 1))
def triangular_solve(L, B):
    """L: (systems, n, n), lower triangle used; B: (systems, n, right-hand sides)."""
    check_shapes(L, B)
    L, B = L.contiguous(), B.contiguous()
    systems, n, R = B.shape
    x = torch.empty_like(B)
    BLOCK_N = max(16, triton.next_power_of_2(n))
    solve_kernel[(systems, triton.cdiv(R, 16))](L, B, x, n, R, BLOCK_N=BLOCK_N, BLOCK_R=16)
    return x


def reference(L, B):
    return torch.linalg.solve_triangular(L.tril(), B, upper=False)


SWEEP = [
    {"Bt": 1024, "n": 64, "rhs": 128},
    {"Bt": 4096, "n": 32, "rhs": 64},
    {"Bt": 515, "n": 61, "rhs": 203},
]
SWEEP_CPU = [{"Bt": 3, "n": 16, "rhs": 23}, {"Bt": 1, "n": 9, "rhs": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    Bt, n, R = dims["Bt"], dims["n"], dims["rhs"]
    L = torch.randn(Bt, n, n, device=device, dtype=dtype) / n
    L = L + torch.eye(n, device=device, dtype=dtype) * 1.5
    return L, torch.randn(Bt, n, R, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def solve_backward_kernel(
    l_ptr, x_ptr, dx_ptr, db_ptr, part_ptr, n, R,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    system = tl.program_id(0).to(tl.int64)
    rhs = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_N)
    mask = (j[:, None] < n) & (rhs[None, :] < R)
    offs = (system * n + j[:, None]) * R + rhs[None, :]
    db = tl.load(dx_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    for step in range(n):
        i = n - 1 - step
        below = (j > i) & (j < n)
        column = tl.load(l_ptr + (system * n + j) * n + i, mask=below, other=0.0).to(tl.float32)
        pivot = tl.load(l_ptr + (system * n + i) * n + i).to(tl.float32)
        known = tl.sum(column[:, None] * db, axis=0)  # rows above i still hold dx
        db = tl.where(j[:, None] == i, (db - known[None, :]) / pivot, db)
    tl.store(db_ptr + offs, db, mask=mask)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dl = -tl.dot(db, tl.trans(x), input_precision=PRECISION)
    slot = system * tl.num_programs(1) + tl.program_id(1)
    dl_mask = (j[:, None] < n) & (j[None, :] < n)
    tl.store(part_ptr + (slot * n + j[:, None]) * n + j[None, :], dl, mask=dl_mask)


@triton.jit
def sum_slots_kernel(part_ptr, dl_ptr, n, slots, BLOCK: tl.constexpr):
    system = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = e < n * n
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(part_ptr + (system * slots + slot) * n * n + e, mask=mask, other=0.0)
    tl.store(dl_ptr + system * n * n + e, tl.where(e % n <= e // n, acc, 0.0), mask=mask)


class TriangularSolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, L, B):
        L = L.contiguous()
        x = triangular_solve(L, B)
        ctx.save_for_backward(L, x)
        return x

    @staticmethod
    def backward(ctx, dx):
        L, x = ctx.saved_tensors
        dx = dx.contiguous()
        systems, n, R = x.shape
        slots = triton.cdiv(R, 16)
        dL, dB = torch.empty_like(L), torch.empty_like(x)
        part = torch.empty((systems, slots, n, n), device=x.device, dtype=torch.float32)
        tiles = {"PRECISION": dot_precision(), "BLOCK_N": max(16, triton.next_power_of_2(n)), "BLOCK_R": 16}
        solve_backward_kernel[(systems, slots)](L, x, dx, dB, part, n, R, **tiles)
        if ctx.needs_input_grad[0]:
            sum_slots_kernel[(systems, triton.cdiv(n * n, 256))](part, dL, n, slots, BLOCK=256)
        return dL if ctx.needs_input_grad[0] else None, dB if ctx.needs_input_grad[1] else None


def triangular_solve_autograd(L, B):
    return TriangularSolve.apply(L, B)
