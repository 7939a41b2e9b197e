"""Coordinate update of an equivariant graph network: each node moves along its differences to all others.

Forward    y_i = x_i + c sum_j (x_i - x_j) phi_ij,   c = 1 / (N - 1);   phi comes from a network on pairs
Backward   dphi_ij = c <dy_i, x_i - x_j>;   node i stands in its own row with every x_i, and in the rows of
           others as what is subtracted:  dx_i = dy_i + c sum_j (phi_ij dy_i - phi_ji dy_j)

Forward schedule: a program owns a tile of nodes and walks all nodes, a tile of phi a step. The coordinates
are three columns: N^2 numbers phi are read for 3 N others, so memory decides and nothing here is worth a dot.
Backward schedule: a row of phi belongs to one node, a column to another, and dx_i wants both. The owner of
nodes i walks j once and loads two tiles, phi[i, j] and phi[j, i]; from the first comes the sum of its own
row, and its dphi is stored while the differences are at hand; from the second, with dy_j, what other rows
owe to i. Each number of dphi is written once, each of phi read twice, and no program waits for another's sum.

op: egnn_coord
schedule: swap_owner, same_tile_pointwise
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_I": 32, "BLOCK_J": 64}


@triton.jit
def load_nodes(ptr, i, N):
    x = tl.load(ptr + 3 * i, mask=i < N, other=0.0)
    y = tl.load(ptr + 3 * i + 1, mask=i < N, other=0.0)
    return x, y, tl.load(ptr + 3 * i + 2, mask=i < N, other=0.0)


@triton.jit
def store_nodes(ptr, i, N, x, y, z):
    tl.store(ptr + 3 * i, x, mask=i < N)
    tl.store(ptr + 3 * i + 1, y, mask=i < N)
    tl.store(ptr + 3 * i + 2, z, mask=i < N)


@triton.jit
def load_pairs(phi_ptr, rows, cols, N):
    mask = (rows[:, None] < N) & (cols[None, :] < N)
    return tl.load(phi_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)


@triton.jit
def update_kernel(x_ptr, phi_ptr, y_ptr, N, c, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64) * N
    i = tl.program_id(1).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    xi, yi, zi = load_nodes(x_ptr + batch * 3, i, N)
    ax = tl.zeros([BLOCK_I], dtype=tl.float32)
    ay = tl.zeros([BLOCK_I], dtype=tl.float32)
    az = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        xj, yj, zj = load_nodes(x_ptr + batch * 3, j, N)
        phi = load_pairs(phi_ptr + batch * N, i, j, N)
        ax += tl.sum(phi * (xi[:, None] - xj[None, :]), axis=1)
        ay += tl.sum(phi * (yi[:, None] - yj[None, :]), axis=1)
        az += tl.sum(phi * (zi[:, None] - zj[None, :]), axis=1)
    store_nodes(y_ptr + batch * 3, i, N, xi + c * ax, yi + c * ay, zi + c * az)


@autodiff(inputs_require_grad=(0, 1))
def coordinate_update(x, phi):
    """x: float32 (B, N, 3); phi: float32 (B, N, N)."""
    B, N, _ = x.shape
    if phi.shape != (B, N, N):
        raise ValueError(f"phi {tuple(phi.shape)} is not for {N} nodes")
    x, phi = x.contiguous(), phi.contiguous()
    y = torch.empty_like(x)
    grid = (B, triton.cdiv(N, BLOCKS["BLOCK_I"]))
    update_kernel[grid](x, phi, y, N, 1 / max(1, N - 1), **BLOCKS)
    return y


def reference(x, phi):
    d = x[:, :, None] - x[:, None]
    return x + (d * phi[..., None]).sum(2) / max(1, x.shape[1] - 1)


SWEEP = [{"B": 64, "N": 512}, {"B": 3, "N": 1531}]
SWEEP_CPU = [{"B": 2, "N": 23}, {"B": 1, "N": 97}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N = dims["B"], dims["N"]
    return torch.randn(B, N, 3, device=device, dtype=dtype), torch.randn(B, N, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def update_backward_kernel(
    x_ptr, phi_ptr, dy_ptr, dx_ptr, dphi_ptr, N, c, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):
    batch = tl.program_id(0).to(tl.int64) * N
    i = tl.program_id(1).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    xi, yi, zi = load_nodes(x_ptr + batch * 3, i, N)
    gxi, gyi, gzi = load_nodes(dy_ptr + batch * 3, i, N)
    own = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.float32)  # of node i's row, summed over j behind the loop
    bx = tl.zeros([BLOCK_I], dtype=tl.float32)
    by = tl.zeros([BLOCK_I], dtype=tl.float32)
    bz = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        xj, yj, zj = load_nodes(x_ptr + batch * 3, j, N)
        gxj, gyj, gzj = load_nodes(dy_ptr + batch * 3, j, N)
        own += load_pairs(phi_ptr + batch * N, i, j, N)
        column = load_pairs(phi_ptr + batch * N, j, i, N)  # (j, i), as it lies in memory
        bx += tl.sum(column * gxj[:, None], axis=0)
        by += tl.sum(column * gyj[:, None], axis=0)
        bz += tl.sum(column * gzj[:, None], axis=0)
        dphi = gxi[:, None] * (xi[:, None] - xj[None, :])
        dphi += gyi[:, None] * (yi[:, None] - yj[None, :])
        dphi += gzi[:, None] * (zi[:, None] - zj[None, :])
        mask = (i[:, None] < N) & (j[None, :] < N)
        tl.store(dphi_ptr + batch * N + i[:, None] * N + j[None, :], c * dphi, mask=mask)
    row_sum = tl.sum(own, axis=1)
    dx, dy, dz = (
        gxi + c * (row_sum * gxi - bx),
        gyi + c * (row_sum * gyi - by),
        gzi + c * (row_sum * gzi - bz),
    )
    store_nodes(dx_ptr + batch * 3, i, N, dx, dy, dz)


class CoordinateUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, phi):
        x, phi = x.contiguous(), phi.contiguous()
        ctx.save_for_backward(x, phi)
        return coordinate_update(x, phi)

    @staticmethod
    def backward(ctx, dy):
        x, phi = ctx.saved_tensors
        B, N, _ = x.shape
        dx, dphi = torch.empty_like(x), torch.empty_like(phi)
        grid = (B, triton.cdiv(N, BLOCKS["BLOCK_I"]))
        update_backward_kernel[grid](x, phi, dy.contiguous(), dx, dphi, N, 1 / max(1, N - 1), **BLOCKS)
        return dx if ctx.needs_input_grad[0] else None, dphi if ctx.needs_input_grad[1] else None


def coordinate_update_autograd(x, phi):
    return CoordinateUpdate.apply(x, phi)
