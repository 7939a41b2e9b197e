"""Kernel matrix of a Gaussian process with a length scale for each input dimension.

Forward    u_ijf = (x_if - y_jf) / l_f,  K_ij = v E_ij,  E_ij = exp(-1/2 sum_f u_ijf^2)
Backward   with G_ij = dK_ij K_ij:
           dx_if = -sum_j G_ij u_ijf / l_f,   dy_jf = sum_i G_ij u_ijf / l_f,
           dl_f = sum_ij G_ij u_ijf^2 / l_f,  dv = sum_ij dK_ij E_ij

Forward schedule: a program owns a tile of K. The inputs of such models are few, so the features are one tile,
and u is made from differences: |x|^2 + |y|^2 - 2 <x, y> would lose near points, which matter most.
Backward schedule: E is rebuilt from the inputs, cheaper than to read it, and exact where v = 0. The owner of
rows i walks j, with dx in registers; the u that it needs for dx is all that dl needs too, so it squares it in
passing, and one partial (D + 1 numbers, dv last) a row tile is left for a second kernel. Only dy changes the
ownership: columns j, walking i.

op: rbf_kernel
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def rebuild(x_ptr, y_ptr, l, i, j, f, M, N, D):
    """u (i, j, feature), 0 past the last feature; E (i, j), 0 for rows that are none."""
    x, y = load_tile(x_ptr, i, f, M, D), load_tile(y_ptr, j, f, N, D)
    u = (x[:, None, :] - y[None, :, :]) / l[None, None, :]
    E = tl.exp(-0.5 * tl.sum(u * u, axis=2))
    return u, tl.where((i[:, None] < M) & (j[None, :] < N), E, 0.0)


@triton.jit
def gram_kernel(x_ptr, y_ptr, l_ptr, v_ptr, k_ptr, M, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, BLOCK_D)
    l = tl.load(l_ptr + f, mask=f < D, other=1.0)
    _, E = rebuild(x_ptr, y_ptr, l, i, j, f, M, N, D)
    mask = (i[:, None] < M) & (j[None, :] < N)
    tl.store(k_ptr + i[:, None].to(tl.int64) * N + j[None, :], tl.load(v_ptr) * E, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def rbf_kernel(x, y, lengths, variance):
    """x: (M, D), y: (N, D), lengths: (D), variance: (1), all float32; gives (M, N)."""
    (M, D), N = x.shape, y.shape[0]
    if y.shape[1] != D or lengths.shape != (D,) or variance.numel() != 1:
        raise ValueError("x, y and lengths must have the same features")
    if D > 32:
        raise ValueError(f"{D} features do not fit one tile")
    x, y, lengths = x.contiguous(), y.contiguous(), lengths.contiguous()
    k = torch.empty((M, N), device=x.device, dtype=x.dtype)
    BLOCK_D = triton.next_power_of_2(D)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    gram_kernel[grid](x, y, lengths, variance, k, M, N, D, BLOCK=16, BLOCK_D=BLOCK_D)
    return k


def reference(x, y, lengths, variance):
    u = (x[:, None, :] - y) / lengths
    return variance * torch.exp(-0.5 * u.pow(2).sum(-1))


SWEEP = [{"M": 4096, "N": 4096, "D": 8}, {"M": 2039, "N": 1500, "D": 21}]
SWEEP_CPU = [{"M": 27, "N": 31, "D": 6}, {"M": 50, "N": 5, "D": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    D = dims["D"]
    x = torch.randn(dims["M"], D, device=device, dtype=dtype)
    y = torch.randn(dims["N"], D, device=device, dtype=dtype)
    lengths = D**0.5 * (0.5 + torch.rand(D, device=device, dtype=dtype))
    return x, y, lengths, torch.full((1,), 1.3, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def weighted(G, u, l):
    """G u / l; where a length scale is 0, u is infinite and G is 0."""
    return tl.where(G[:, :, None] != 0, G[:, :, None] * u / l[None, None, :], 0.0)


@triton.jit
def row_owner_kernel(
    x_ptr, y_ptr, l_ptr, v_ptr, dk_ptr, dx_ptr, part_ptr, M, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, BLOCK_D)
    l = tl.load(l_ptr + f, mask=f < D, other=1.0)
    v = tl.load(v_ptr)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dl = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        u, E = rebuild(x_ptr, y_ptr, l, i, j, f, M, N, D)
        mask = (i[:, None] < M) & (j[None, :] < N)
        dk = tl.load(dk_ptr + i[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=0.0)
        dv += tl.sum(dk * E, axis=1)
        Gu = weighted(dk * v * E, u, l)
        dx -= tl.sum(Gu, axis=1)
        dl += tl.sum(tl.where(Gu != 0, Gu * u, 0.0), axis=1)
    mask = (i[:, None] < M) & (f[None, :] < D)
    tl.store(dx_ptr + i[:, None].to(tl.int64) * D + f[None, :], dx, mask=mask)
    slot = part_ptr + tl.program_id(0) * (D + 1)
    tl.store(slot + f, tl.sum(dl, axis=0), mask=f < D)
    tl.store(slot + D, tl.sum(dv, axis=0))


@triton.jit
def column_owner_kernel(
    x_ptr, y_ptr, l_ptr, v_ptr, dk_ptr, dy_ptr, M, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, BLOCK_D)
    l = tl.load(l_ptr + f, mask=f < D, other=1.0)
    v = tl.load(v_ptr)
    dy = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        u, E = rebuild(x_ptr, y_ptr, l, i, j, f, M, N, D)
        mask = (i[:, None] < M) & (j[None, :] < N)
        dk = tl.load(dk_ptr + i[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=0.0)
        Gu = weighted(dk * v * E, u, l)
        dy += tl.sum(Gu, axis=0)
    mask = (j[:, None] < N) & (f[None, :] < D)
    tl.store(dy_ptr + j[:, None].to(tl.int64) * D + f[None, :], dy, mask=mask)


@triton.jit
def parameter_kernel(part_ptr, dl_ptr, dv_ptr, slots, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    f = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += load_tile(part_ptr, slot, f, slots, D + 1)
    total = tl.sum(total, axis=0)
    tl.store(dl_ptr + f, total, mask=f < D)
    tl.store(dv_ptr + f * 0, total, mask=f == D)


class RBFKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, lengths, variance):
        x, y, lengths = x.contiguous(), y.contiguous(), lengths.contiguous()
        ctx.save_for_backward(x, y, lengths, variance)
        return rbf_kernel(x, y, lengths, variance)

    @staticmethod
    def backward(ctx, dk):
        saved = ctx.saved_tensors
        x, y = saved[:2]
        dk, needs = dk.contiguous(), ctx.needs_input_grad
        (M, D), N = x.shape, y.shape[0]
        dx, dy, dl, dv = (torch.empty_like(tensor) for tensor in saved)
        slots, BLOCK_D = triton.cdiv(M, 16), triton.next_power_of_2(D)
        if needs[0] or needs[2] or needs[3]:
            part = torch.empty((slots, D + 1), device=x.device, dtype=torch.float32)
            row_owner_kernel[(slots,)](*saved, dk, dx, part, M, N, D, BLOCK=16, BLOCK_D=BLOCK_D)
        if needs[1]:
            column_owner_kernel[(triton.cdiv(N, 16),)](*saved, dk, dy, M, N, D, BLOCK=16, BLOCK_D=BLOCK_D)
        if needs[2] or needs[3]:
            parameter_kernel[(1,)](part, dl, dv, slots, D, BLOCK=32, BLOCK_D=triton.next_power_of_2(D + 1))
        return tuple(g if need else None for g, need in zip((dx, dy, dl, dv), needs, strict=True))


def rbf_kernel_autograd(x, y, lengths, variance):
    return RBFKernel.apply(x, y, lengths, variance)
