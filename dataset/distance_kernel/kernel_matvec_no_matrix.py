"""Product of a Gaussian kernel matrix with a matrix, which is never stored.

Forward    u_ij = x_i - z_j,  k_ij = exp(-|u_ij|^2 / 2),  y_i = sum_j k_ij b_j
Backward   with h_ij = k_ij <dy_i, b_j>:
           dx_i = -sum_j h_ij u_ij,  dz_j = sum_i h_ij u_ij,  db_j = sum_i k_ij dy_i

Forward schedule: a program owns rows i of y and walks j: a tile of k is made from differences of the points,
whose coordinates are few, multiplied with b, and forgotten.
Backward schedule: as in attention, both sides need the same tile and sum it along different axes, so each
rebuilds it: the owner of i walks j for dx, the owner of j walks i with dz and db in registers. Beside the
tile of k there is one of <dy_i, b_j>, a product over the columns of b. Memory stays linear in the number of
points, which is the reason for such an operator; a stored k would be M N numbers, read twice.

op: kernel_matvec
schedule: swap_owner, recompute_from_stats
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
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], value, mask=mask)


@triton.jit
def rebuild(x_ptr, z_ptr, i, j, f, M, N, D):
    """u (i, j, coordinate) and k (i, j), 0 for points that are none; u, maybe infinite, is 0 where k is."""
    x, z = load_tile(x_ptr, i, f, M, D), load_tile(z_ptr, j, f, N, D)
    u = x[:, None, :] - z[None, :, :]
    k = tl.exp(-0.5 * tl.sum(u * u, axis=2))
    k = tl.where((i[:, None] < M) & (j[None, :] < N), k, 0.0)
    return tl.where(k[:, :, None] > 0, u, 0.0), k


@triton.jit
def matvec_kernel(
    x_ptr, z_ptr, b_ptr, y_ptr, M, N, D, C,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    y = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        _, k = rebuild(x_ptr, z_ptr, i, j, f, M, N, D)
        y = tl.dot(k, load_tile(b_ptr, j, c, N, C), y, input_precision=PRECISION)
    store_tile(y_ptr, y, i, c, M, C)


def tile_size(D, C):
    """Differences have D numbers a pair, so that more coordinates want smaller tiles."""
    return 32 if D <= 4 and C <= 32 else 16


def tiling(D, C):
    if D > 16 or C > 64:
        raise ValueError(f"{D} coordinates and {C} columns do not fit one tile")
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    blocks = {"BLOCK_D": triton.next_power_of_2(D), "BLOCK_C": max(16, triton.next_power_of_2(C))}
    return {"PRECISION": PRECISION, "BLOCK": tile_size(D, C), **blocks}


@autodiff(inputs_require_grad=(0, 1, 2))
def kernel_matvec(x, z, b):
    """x: (M, D), z: (N, D), in units of the kernel's width; b: (N, C); all float32; gives (M, C)."""
    if x.shape[1] != z.shape[1] or z.shape[0] != b.shape[0]:
        raise ValueError("need x (M, D), z (N, D) and b (N, C)")
    x, z, b = x.contiguous(), z.contiguous(), b.contiguous()
    (M, D), (N, C) = x.shape, b.shape
    y = torch.empty((M, C), device=x.device, dtype=x.dtype)
    matvec_kernel[(triton.cdiv(M, tile_size(D, C)),)](x, z, b, y, M, N, D, C, **tiling(D, C))
    return y


def reference(x, z, b):
    return torch.exp(-0.5 * (x[:, None, :] - z).pow(2).sum(-1)) @ b


SWEEP = [{"M": 16384, "N": 16384, "D": 3, "C": 16}, {"M": 8191, "N": 4000, "D": 7, "C": 5}]
SWEEP_CPU = [{"M": 41, "N": 37, "D": 3, "C": 4}, {"M": 9, "N": 70, "D": 5, "C": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    D = dims["D"]
    x = torch.randn(dims["M"], D, device=device, dtype=dtype)
    z = torch.randn(dims["N"], D, device=device, dtype=dtype)
    return x, z, torch.randn(dims["N"], dims["C"], device=device, dtype=dtype) / dims["N"] ** 0.5


# ---- backward ----


@triton.jit
def target_kernel(
    x_ptr, z_ptr, b_ptr, dy_ptr, dx_ptr, M, N, D, C,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    dy = load_tile(dy_ptr, i, c, M, C)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        u, k = rebuild(x_ptr, z_ptr, i, j, f, M, N, D)
        h = k * tl.dot(dy, tl.trans(load_tile(b_ptr, j, c, N, C)), input_precision=PRECISION)
        dx -= tl.sum(h[:, :, None] * u, axis=1)
    store_tile(dx_ptr, dx, i, f, M, D)


@triton.jit
def source_kernel(
    x_ptr, z_ptr, b_ptr, dy_ptr, dz_ptr, db_ptr, M, N, D, C,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    b = load_tile(b_ptr, j, c, N, C)
    dz = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    db = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        u, k = rebuild(x_ptr, z_ptr, i, j, f, M, N, D)
        dy = load_tile(dy_ptr, i, c, M, C)
        h = k * tl.dot(dy, tl.trans(b), input_precision=PRECISION)
        dz += tl.sum(h[:, :, None] * u, axis=0)
        db = tl.dot(tl.trans(k), dy, db, input_precision=PRECISION)
    store_tile(dz_ptr, dz, j, f, N, D)
    store_tile(db_ptr, db, j, c, N, C)


class KernelMatvec(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, b):
        x, z, b = x.contiguous(), z.contiguous(), b.contiguous()
        ctx.save_for_backward(x, z, b)
        return kernel_matvec(x, z, b)

    @staticmethod
    def backward(ctx, dy):
        x, z, b = ctx.saved_tensors
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        (M, D), (N, C) = x.shape, b.shape
        dx, dz, db = torch.empty_like(x), torch.empty_like(z), torch.empty_like(b)
        if needs[0]:
            target_kernel[(triton.cdiv(M, tile_size(D, C)),)](x, z, b, dy, dx, M, N, D, C, **tiling(D, C))
        if needs[1] or needs[2]:
            source_kernel[(triton.cdiv(N, tile_size(D, C)),)](x, z, b, dy, dz, db, M, N, D, C, **tiling(D, C))
        return dx if needs[0] else None, dz if needs[1] else None, db if needs[2] else None


def kernel_matvec_autograd(x, z, b):
    return KernelMatvec.apply(x, z, b)
