"""Orthogonal layer as a chain of Householder reflections.

Forward    u_k = v_k / |v_k|,   x_k = x_k-1 - 2 u_k <u_k, x_k-1> for k = 1 .. K, for each row x_0;  y = x_K
Backward   a reflection is its own inverse and its own adjoint:  x_k-1 = x_k - 2 u_k <u_k, x_k>, and
           g_k-1 = g_k - 2 u_k <u_k, g_k>.  With s = <u_k, x_k-1> = -<u_k, x_k>, c = <u_k, g_k>:
           du_k = -2 sum over rows of (s g_k + c x_k-1),   dv_k = (du_k - u_k <u_k, du_k>) / |v_k|

Forward schedule: a program owns a few rows in registers and reflects them K times; u_k is made on the way.
Backward schedule: rows are un-reflected from the output together with their gradient, so the K states between
are never stored: they would be K times the input. A v_k belongs to all rows: a program walks tiles of rows
and adds what they give to its own slot of (K, N) numbers, which no other program touches; a second kernel,
with an owner for each v_k, adds the slots and, having the whole sum, applies the projection of the
normalisation.

op: householder_chain
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_unit(v_ptr, k, cols, N):
    v = tl.load(v_ptr + k * N + cols, mask=cols < N, other=0.0)
    r = tl.rsqrt(tl.sum(v * v, axis=0))
    return v * r, r


@triton.jit
def reflect_kernel(x_ptr, v_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None].to(tl.int64) * N + cols[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    for k in range(K):
        u, _ = load_unit(v_ptr, k, cols, N)
        x -= 2 * tl.sum(x * u[None, :], axis=1)[:, None] * u[None, :]
    tl.store(y_ptr + offs, x, mask=mask)


def tiling(v):
    N = v.shape[1]
    if not 1 <= N <= 4096:
        raise ValueError(f"rows of {N} do not fit one tile")
    BLOCK_N = triton.next_power_of_2(N)
    return {"BLOCK_M": max(1, 4096 // BLOCK_N), "BLOCK_N": BLOCK_N}


@autodiff(inputs_require_grad=(0, 1))
def householder_chain(x, v):
    """x: (M, N); v: (K, N), none of them zero; float32."""
    if x.shape[1] != v.shape[1]:
        raise ValueError("x and v must have rows of one length")
    x, v, (M, N), tiles = x.contiguous(), v.contiguous(), x.shape, tiling(v)
    y = torch.empty_like(x)
    reflect_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, v, y, M, N, v.shape[0], **tiles)
    return y


def reference(x, v):
    for row in v:
        u = row / row.norm()
        x = x - 2 * (x @ u)[:, None] * u
    return x


SWEEP = [{"M": 32768, "N": 1024, "K": 16}, {"M": 20011, "N": 500, "K": 33}]
SWEEP_CPU = [{"M": 29, "N": 16, "K": 5}, {"M": 150, "N": 45, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----

MAX_GROUPS = 512


@triton.jit
def unreflect_kernel(
    y_ptr, v_ptr, dy_ptr, dx_ptr, part_ptr, M, N, K, G, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    slot = part_ptr + pid.to(tl.int64) * K * N + cols
    for tile in range(pid, tl.cdiv(M, BLOCK_M), G):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None].to(tl.int64) * N + cols[None, :]
        x = tl.load(y_ptr + offs, mask=mask, other=0.0)
        g = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        for step in range(K):
            k = K - 1 - step
            u, _ = load_unit(v_ptr, k, cols, N)
            s = -tl.sum(x * u[None, :], axis=1)[:, None]
            c = tl.sum(g * u[None, :], axis=1)[:, None]
            x += 2 * s * u[None, :]
            du = -2 * tl.sum(s * g + c * x, axis=0)
            g -= 2 * c * u[None, :]
            before = tl.load(slot + k * N, mask=cols < N, other=0.0)
            tl.store(slot + k * N, before + du, mask=cols < N)
        tl.debug_barrier()  # the next tile reads the slot back
        tl.store(dx_ptr + offs, g, mask=mask)


@triton.jit
def project_kernel(part_ptr, v_ptr, dv_ptr, G, N, K, BLOCK_N: tl.constexpr):
    k = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    du = tl.zeros([BLOCK_N], dtype=tl.float32)
    for group in range(G):
        slot = part_ptr + (tl.program_id(0).to(tl.int64) + group * K) * N
        du += tl.load(slot + cols, mask=cols < N, other=0.0)
    u, r = load_unit(v_ptr, k, cols, N)
    dv = (du - u * tl.sum(u * du, axis=0)) * r
    tl.store(dv_ptr + k * N + cols, dv, mask=cols < N)


class HouseholderChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v):
        v = v.contiguous()
        y = householder_chain(x, v)
        ctx.save_for_backward(y, v)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, v = ctx.saved_tensors
        (M, N), K, tiles = y.shape, v.shape[0], tiling(v)
        G = min(MAX_GROUPS, triton.cdiv(M, tiles["BLOCK_M"]))
        dx, dv = torch.empty_like(y), torch.empty_like(v)
        part = torch.zeros((G, K, N), device=y.device, dtype=torch.float32)
        unreflect_kernel[(G,)](y, v, dy.contiguous(), dx, part, M, N, K, G, **tiles)
        needs = ctx.needs_input_grad
        if needs[1]:
            project_kernel[(K,)](part, v, dv, G, N, K, BLOCK_N=tiles["BLOCK_N"])
        return dx if needs[0] else None, dv if needs[1] else None


def householder_chain_autograd(x, v):
    return HouseholderChain.apply(x, v)
