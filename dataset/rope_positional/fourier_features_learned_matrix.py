"""Fourier features with learned frequencies: coordinates become sines and cosines of linear phases.

Forward    z = 2 pi x B,  y = [sin z, cos z]
Backward   dz = ds cos z - dc sin z with dy = [ds, dc];   dx = 2 pi dz B^T,  dB = 2 pi x^T dz

Forward schedule: a program owns (tile of points, tile of features). K is the dimension of a space, two to a
dozen, so the product is a short loop of outer products in fp32, not a dot padded to 16: phases are multiplied
by 2 pi and rounding them in a tensor core would turn the angle.
Backward schedule: the phase is cheaper to make than to load, so it is made again and only x and B are saved;
dz exists in registers alone. The two sums run along the two axes of its tile, so there are two owners: a tile
of points walks all features for dx, a tile of features walks points for dB; there each has one column of K
numbers, accumulated in a tile of features by K. Points are many and features few, so dB's points are split
into slots and a second kernel adds them.

op: fourier_features
schedule: recompute_from_stats, swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TAU = tl.constexpr(6.283185307179586)
TILE = {"BLOCK_M": 32, "BLOCK_N": 64}


@triton.jit
def phase(x_ptr, b_ptr, m, n, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    z = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(K):
        x = tl.load(x_ptr + m * K + k, mask=m < M, other=0.0)
        b = tl.load(b_ptr + k * N + n, mask=n < N, other=0.0)
        z += x[:, None] * b[None, :]
    return TAU * z


@triton.jit
def fourier_kernel(x_ptr, b_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = phase(x_ptr, b_ptr, m, n, M, N, K, BLOCK_M, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    y = y_ptr + m[:, None] * 2 * N + n[None, :]
    tl.store(y, tl.sin(z), mask=mask)
    tl.store(y + N, tl.cos(z), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def fourier_features(x, B):
    """x: (M, K) float32, K at most 64; B: (K, N) float32; gives (M, 2 N)."""
    (M, K), N = x.shape, B.shape[1]
    if K > 64 or B.shape[0] != K:
        raise ValueError(f"coordinates {tuple(x.shape)} and matrix {tuple(B.shape)} do not fit")
    y = torch.empty((M, 2 * N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"]))
    fourier_kernel[grid](x.contiguous(), B.contiguous(), y, M, N, K, **TILE)
    return y


def reference(x, B):
    z = 2 * torch.pi * (x @ B)
    return torch.cat([z.sin(), z.cos()], dim=1)


SWEEP = [{"M": 262144, "K": 3, "N": 256}, {"M": 100003, "K": 7, "N": 130}]
SWEEP_CPU = [{"M": 41, "K": 3, "N": 40}, {"M": 70, "K": 2, "N": 90}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.rand(dims["M"], dims["K"], device=device, dtype=dtype)
    return x, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----

MAX_SLOTS = 128


@triton.jit
def phase_grad(x_ptr, b_ptr, dy_ptr, m, n, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dz, and 0 outside, as what is outside was not loaded."""
    z = phase(x_ptr, b_ptr, m, n, M, N, K, BLOCK_M, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    dy = dy_ptr + m[:, None] * 2 * N + n[None, :]
    ds = tl.load(dy, mask=mask, other=0.0)
    dc = tl.load(dy + N, mask=mask, other=0.0)
    return ds * tl.cos(z) - dc * tl.sin(z)


@triton.jit
def dx_kernel(
    x_ptr, b_ptr, dy_ptr, dx_ptr, M, N, K,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    dx = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dz = phase_grad(x_ptr, b_ptr, dy_ptr, m, n, M, N, K, BLOCK_M, BLOCK_N)
        for k in range(K):
            b = tl.load(b_ptr + k * N + n, mask=n < N, other=0.0)
            along = tl.sum(dz * b[None, :], axis=1)
            dx += tl.where(ks[None, :] == k, along[:, None], 0.0)
    mask = (m[:, None] < M) & (ks[None, :] < K)
    tl.store(dx_ptr + m[:, None] * K + ks[None, :], TAU * dx, mask=mask)


@triton.jit
def matrix_parts_kernel(
    x_ptr, b_ptr, dy_ptr, part_ptr, M, N, K,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    db = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(slot * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dz = phase_grad(x_ptr, b_ptr, dy_ptr, m, n, M, N, K, BLOCK_M, BLOCK_N)
        for k in range(K):
            x = tl.load(x_ptr + m * K + k, mask=m < M, other=0.0)
            across = tl.sum(dz * x[:, None], axis=0)
            db += tl.where(ks[:, None] == k, across[None, :], 0.0)
    mask = (ks[:, None] < K) & (n[None, :] < N)
    tl.store(part_ptr + (slot * K + ks[:, None]) * N + n[None, :], TAU * db, mask=mask)


@triton.jit
def add_slots_kernel(part_ptr, out_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, acc, mask=at < n)


class FourierFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, B):
        x, B = x.contiguous(), B.contiguous()
        ctx.save_for_backward(x, B)
        return fourier_features(x, B)

    @staticmethod
    def backward(ctx, dy):
        x, B = ctx.saved_tensors
        (M, K), N, dy = x.shape, B.shape[1], dy.contiguous()
        tiles = {"BLOCK_K": triton.next_power_of_2(K), **TILE}
        row_tiles = triton.cdiv(M, TILE["BLOCK_M"])
        dx = dB = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(row_tiles,)](x, B, dy, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[1]:
            dB, slots = torch.empty_like(B), min(row_tiles, MAX_SLOTS)
            part = torch.empty((slots, K, N), device=x.device, dtype=torch.float32)
            grid = (slots, triton.cdiv(N, TILE["BLOCK_N"]))
            matrix_parts_kernel[grid](x, B, dy, part, M, N, K, **tiles)
            add_slots_kernel[(triton.cdiv(K * N, 128),)](part, dB, K * N, slots, BLOCK=128)
        return dx, dB


def fourier_features_autograd(x, B):
    return FourierFeatures.apply(x, B)
