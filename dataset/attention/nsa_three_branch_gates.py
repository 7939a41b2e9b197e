"""The end of native sparse attention: three branches of a head, each through a gate of its own, added.

Forward    s_n = sigmoid(g_n),   o = sum_{n < N} s_n a_n     for each token and head, over its N branches
Backward   da_n = s_n do,   dg_n = <do, a_n> s_n (1 - s_n)

Forward schedule: a program owns a few rows, one row a token and head, and runs through the branches with o in
registers: N reads and one write, where a product and a sum of tensors would store each gated branch.
Backward schedule: the same owner. do is loaded once and meets each branch twice, elementwise for da and in a
dot for dg: a branch is read and its gradient written in the same visit. The gates are per token and head, so
that the dot is a row's own and nothing is summed over programs. Only inputs are kept.

op: branch_gates
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, rows, cols, n, M, D):
    """Rows of branch n; rows are int64."""
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    offs = (n * M + rows)[:, None] * D + cols[None, :]
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, value, rows, cols, n, M, D):
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    offs = (n * M + rows)[:, None] * D + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(g_ptr, rows, n, M, N):
    return tl.sigmoid(tl.load(g_ptr + rows * N + n, mask=rows < M, other=0.0).to(tl.float32))


@triton.jit
def branch_gates_kernel(a_ptr, g_ptr, o_ptr, N, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    o = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for n in range(N):
        o += load_gate(g_ptr, rows, n, M, N)[:, None] * load_rows(a_ptr, rows, cols, n, M, D)
    store_rows(o_ptr, o, rows, cols, 0, M, D)


def tiling(D):
    BLOCK = triton.next_power_of_2(D)
    return {"ROWS": max(1, 2048 // BLOCK), "BLOCK": BLOCK}


@autodiff(inputs_require_grad=(0, 1))
def branch_gates(a, g):
    """a: (N, T, H, D), the branches' outputs; g: (T, H, N), gates before the sigmoid; gives (T, H, D)."""
    a, g = a.contiguous(), g.contiguous()
    N, T, H, D = a.shape
    if g.shape != (T, H, N):
        raise ValueError("g must have a gate for each token, head and branch")
    if D > 16384:
        raise ValueError(f"a row of {D} does not fit one tile")
    o, tiles = torch.empty((T, H, D), device=a.device, dtype=a.dtype), tiling(D)
    branch_gates_kernel[(triton.cdiv(T * H, tiles["ROWS"]),)](a, g, o, N, T * H, D, **tiles)
    return o


def reference(a, g):
    return torch.einsum("nthd,thn->thd", a, torch.sigmoid(g))


SWEEP = [{"N": 3, "T": 8192, "H": 32, "D": 128}, {"N": 2, "T": 4099, "H": 12, "D": 80}]
SWEEP_CPU = [{"N": 3, "T": 21, "H": 3, "D": 20}, {"N": 2, "T": 130, "H": 1, "D": 32}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, T, H, D = (dims[name] for name in ("N", "T", "H", "D"))
    a = torch.randn(N, T, H, D, device=device, dtype=dtype)
    return a, torch.randn(T, H, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def branch_gates_backward_kernel(
    a_ptr, g_ptr, do_ptr, da_ptr, dg_ptr, N, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    do = load_rows(do_ptr, rows, cols, 0, M, D)
    for n in range(N):
        s = load_gate(g_ptr, rows, n, M, N)
        dot = tl.sum(do * load_rows(a_ptr, rows, cols, n, M, D), axis=1)
        dg = dot * s * (1 - s)
        tl.store(dg_ptr + rows * N + n, dg.to(dg_ptr.dtype.element_ty), mask=rows < M)
        store_rows(da_ptr, s[:, None] * do, rows, cols, n, M, D)


class BranchGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, g):
        a, g = a.contiguous(), g.contiguous()
        ctx.save_for_backward(a, g)
        return branch_gates(a, g)

    @staticmethod
    def backward(ctx, do):
        a, g = ctx.saved_tensors
        N, T, H, D = a.shape
        da, dg, tiles = torch.empty_like(a), torch.empty_like(g), tiling(D)
        branch_gates_backward_kernel[(triton.cdiv(T * H, tiles["ROWS"]),)](
            a, g, do.contiguous(), da, dg, N, T * H, D, **tiles
        )
        return da if ctx.needs_input_grad[0] else None, dg if ctx.needs_input_grad[1] else None


def branch_gates_autograd(a, g):
    return BranchGates.apply(a, g)
