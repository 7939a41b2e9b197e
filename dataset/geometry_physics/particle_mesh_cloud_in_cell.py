"""Cloud-in-cell deposit: particles give their masses to the eight nearest nodes of a periodic grid.

Forward    a particle at x, in units of cells, with b = floor(x), t = x - b:  for the corners c in {0, 1}^3
           w_c = prod_a (t_a if c_a else 1 - t_a);   rho at (b + c) mod G gets m w_c
Backward   with g_c = drho at (b + c) mod G:  dm = sum_c w_c g_c,
           dx_a = m sum_c g_c (1 if c_a else -1) times c's other two factors

Forward schedule: a program owns a tile of particles; where they land is data, and several land on one node,
so it adds by atomics into zeros.
Backward schedule: a scatter turned round is a gather at the same places: each particle reads its eight nodes
of drho and has its four gradients in registers, with no atomics and no zero fill, so the backward is the
cheaper half. The places are made again from x: floor and remainder are a few operations, and eight saved
indices would be twice the particle.

op: cloud_in_cell
schedule: gather_transpose, same_tile_pointwise
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def load_axis(x_ptr, n, axis: tl.constexpr, N, G):
    """The nodes on either side along one axis, and how far the particle is from the first to the second."""
    x = tl.load(x_ptr + 3 * n + axis, mask=n < N, other=0.0)
    low = tl.floor(x)
    node = (low.to(tl.int64) % G + G) % G  # a remainder has its dividend's sign
    return node, (node + 1) % G, x - low


@triton.jit
def deposit_kernel(x_ptr, m_ptr, rho_ptr, N, G, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i0, i1, u = load_axis(x_ptr, n, 0, N, G)
    j0, j1, v = load_axis(x_ptr, n, 1, N, G)
    k0, k1, w = load_axis(x_ptr, n, 2, N, G)
    m = tl.load(m_ptr + n, mask=n < N, other=0.0)
    for c in tl.static_range(8):
        i, j, k = i1 if c // 4 else i0, j1 if c // 2 % 2 else j0, k1 if c % 2 else k0
        share = (u if c // 4 else 1 - u) * (v if c // 2 % 2 else 1 - v) * (w if c % 2 else 1 - w)
        tl.atomic_add(rho_ptr + (i * G + j) * G + k, m * share, mask=n < N, sem="relaxed")


@autodiff(inputs_require_grad=(0, 1))
def deposit(x, m, G):
    """x: float32 (N, 3), in cells, any numbers; m: float32 (N); gives (G, G, G)."""
    N = x.shape[0]
    if x.shape != (N, 3) or m.shape != (N,) or G < 1:
        raise ValueError(f"x {tuple(x.shape)} and m {tuple(m.shape)} on a grid of {G}")
    rho = torch.zeros((G, G, G), device=x.device, dtype=x.dtype)
    deposit_kernel[(triton.cdiv(N, BLOCK),)](x.contiguous(), m.contiguous(), rho, N, G, BLOCK=BLOCK)
    return rho


def reference(x, m, G):
    b = x.detach().floor()
    t, rho = x - b, x.new_zeros(G**3)
    for c in range(8):
        bits = (c // 4, c // 2 % 2, c % 2)
        share, node = m, 0
        for axis in range(3):
            share = share * (t[:, axis] if bits[axis] else 1 - t[:, axis])
            node = node * G + (b[:, axis].long() + bits[axis]).remainder(G)
        rho = rho.index_add(0, node, share)
    return rho.view(G, G, G)


SWEEP = [{"N": 2000000, "G": 128}, {"N": 100003, "G": 61}]
SWEEP_CPU = [{"N": 41, "G": 4}, {"N": 150, "G": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, G = dims["N"], max(1, dims["G"])
    x = 2 * G * torch.rand(N, 3, device=device, dtype=dtype) - G / 2
    return x, 0.5 + torch.rand(N, device=device, dtype=dtype), G


# ---- backward ----


@triton.jit
def deposit_backward_kernel(x_ptr, m_ptr, drho_ptr, dx_ptr, dm_ptr, N, G, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i0, i1, u = load_axis(x_ptr, n, 0, N, G)
    j0, j1, v = load_axis(x_ptr, n, 1, N, G)
    k0, k1, w = load_axis(x_ptr, n, 2, N, G)
    dm = tl.zeros([BLOCK], dtype=tl.float32)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    dy = tl.zeros([BLOCK], dtype=tl.float32)
    dz = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(8):
        i, j, k = i1 if c // 4 else i0, j1 if c // 2 % 2 else j0, k1 if c % 2 else k0
        wu, wv, ww = u if c // 4 else 1 - u, v if c // 2 % 2 else 1 - v, w if c % 2 else 1 - w
        g = tl.load(drho_ptr + (i * G + j) * G + k, mask=n < N, other=0.0)
        dm += wu * wv * ww * g
        dx += (g if c // 4 else -g) * wv * ww
        dy += (g if c // 2 % 2 else -g) * wu * ww
        dz += (g if c % 2 else -g) * wu * wv
    m = tl.load(m_ptr + n, mask=n < N, other=0.0)
    tl.store(dm_ptr + n, dm, mask=n < N)
    tl.store(dx_ptr + 3 * n, m * dx, mask=n < N)
    tl.store(dx_ptr + 3 * n + 1, m * dy, mask=n < N)
    tl.store(dx_ptr + 3 * n + 2, m * dz, mask=n < N)


class Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m, G):
        x, m = x.contiguous(), m.contiguous()
        ctx.save_for_backward(x, m)
        ctx.G = G
        return deposit(x, m, G)

    @staticmethod
    def backward(ctx, drho):
        x, m = ctx.saved_tensors
        N, dx, dm = x.shape[0], torch.empty_like(x), torch.empty_like(m)
        deposit_backward_kernel[(triton.cdiv(N, BLOCK),)](
            x, m, drho.contiguous(), dx, dm, N, ctx.G, BLOCK=BLOCK
        )
        return dx if ctx.needs_input_grad[0] else None, dm if ctx.needs_input_grad[1] else None, None


def deposit_autograd(x, m, G):
    return Deposit.apply(x, m, G)
