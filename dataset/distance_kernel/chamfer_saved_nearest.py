"""Nearest-neighbour distances between two point clouds, both ways: the parts of a Chamfer loss.

Forward    n_i = the first j with the least |x_i - y_j|^2,  a_i = |x_i - y_{n_i}|^2;
           m_j = the first i with the least |x_i - y_j|^2,  b_j = |x_{m_j} - y_j|^2
Backward   n and m are piecewise constant. With u_i = 2 da_i (x_i - y_{n_i}) and v_j = 2 db_j (y_j - x_{m_j}):
           dx_i = u_i - sum_{j: m_j = i} v_j,   dy_j = v_j - sum_{i: n_i = j} u_i

Forward schedule: a program owns a tile of one cloud and walks the other, keeping the best distance and its
place; the cloud's other direction is a second launch with the clouds exchanged. The places are saved.
Backward schedule: the search is not repeated. A saved place is one edge between two points, and its gradient
goes to both ends with opposite signs. A point has one edge of its own and, on average, one that arrives from
the other cloud, seldom many: so each edge adds to its ends by atomics, into zeroed gradients. Inverting the
places by a sort would cost more than all the additions. Both directions are the same kernel.

op: chamfer
schedule: index_or_seed_replay, atomic_accumulate
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def nearest_kernel(
    own_ptr, other_ptr, place_ptr, a_ptr, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    cloud = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.arange(0, BLOCK_D)
    own_mask = (i[:, None] < M) & (f[None, :] < D)
    own = tl.load(own_ptr + (cloud * M + i[:, None]) * D + f[None, :], mask=own_mask, other=0.0)
    best = tl.full([BLOCK_M], float("inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK_M], dtype=tl.int32)
    for start in range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        mask = (j[:, None] < N) & (f[None, :] < D)
        other = tl.load(other_ptr + (cloud * N + j[:, None]) * D + f[None, :], mask=mask, other=0.0)
        u = own[:, None, :] - other[None, :, :]
        q = tl.where(j[None, :] < N, tl.sum(u * u, axis=2), float("inf"))
        least = tl.min(q, axis=1)
        place = tl.where(least < best, start + tl.argmin(q, axis=1), place)
        best = tl.minimum(least, best)
    offs = (cloud * N + place[:, None]) * D + f[None, :]
    u = own - tl.load(other_ptr + offs, mask=own_mask, other=0.0)
    tl.store(a_ptr + cloud * M + i, tl.sum(u * u, axis=1), mask=i < M)
    tl.store(place_ptr + cloud * M + i, place, mask=i < M)


def nearest(own, other):
    (B, M, D), N = own.shape, other.shape[1]
    a = torch.empty((B, M), device=own.device, dtype=own.dtype)
    place = torch.empty((B, M), device=own.device, dtype=torch.int32)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": triton.next_power_of_2(D)}
    nearest_kernel[(triton.cdiv(M, 32), B)](own, other, place, a, M, N, D, **blocks)
    return a, place


def check_clouds(x, y):
    if x.shape[0] != y.shape[0] or x.shape[2] != y.shape[2]:
        raise ValueError("need x (B, M, D) and y (B, N, D)")
    if not 1 <= x.shape[2] <= 8 or x.shape[1] == 0 or y.shape[1] == 0:
        raise ValueError("need points in both clouds, of 1 to 8 coordinates")


@autodiff(inputs_require_grad=(0, 1))
def chamfer_distances(x, y):
    """x: (B, M, D), y: (B, N, D), float32; gives the squared distances a (B, M) and b (B, N)."""
    check_clouds(x, y)
    x, y = x.contiguous(), y.contiguous()
    return nearest(x, y)[0], nearest(y, x)[0]


def reference(x, y):
    q = (x[:, :, None, :] - y[:, None, :, :]).pow(2).sum(-1)
    return q.min(2).values, q.min(1).values


SWEEP = [{"B": 8, "M": 4096, "N": 4096, "D": 3}, {"B": 3, "M": 2047, "N": 5000, "D": 3}]
SWEEP_CPU = [{"B": 2, "M": 33, "N": 41, "D": 3}, {"B": 1, "M": 90, "N": 7, "D": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, N, D = (dims[name] for name in ("B", "M", "N", "D"))
    x = torch.randn(B, M, D, device=device, dtype=dtype)
    return x, torch.randn(B, N, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def edge_kernel(
    own_ptr, other_ptr, place_ptr, da_ptr, down_ptr, dother_ptr, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    cloud = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.arange(0, BLOCK_D)
    mask = (i[:, None] < M) & (f[None, :] < D)
    place = tl.load(place_ptr + cloud * M + i, mask=i < M, other=0)
    da = tl.load(da_ptr + cloud * M + i, mask=i < M, other=0.0)
    own_offs = (cloud * M + i[:, None]) * D + f[None, :]
    other_offs = (cloud * N + place[:, None]) * D + f[None, :]
    own = tl.load(own_ptr + own_offs, mask=mask, other=0.0)
    other = tl.load(other_ptr + other_offs, mask=mask, other=0.0)
    u = 2 * da[:, None] * (own - other)
    tl.atomic_add(down_ptr + own_offs, u, mask=mask, sem="relaxed")
    tl.atomic_add(dother_ptr + other_offs, -u, mask=mask, sem="relaxed")


class ChamferDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        check_clouds(x, y)
        x, y = x.contiguous(), y.contiguous()
        (a, n), (b, m) = nearest(x, y), nearest(y, x)
        ctx.save_for_backward(x, y, n, m)
        return a, b

    @staticmethod
    def backward(ctx, da, db):
        x, y, n, m = ctx.saved_tensors
        (B, M, D), N = x.shape, y.shape[1]
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        blocks = {"BLOCK_M": 128, "BLOCK_D": triton.next_power_of_2(D)}
        edge_kernel[(triton.cdiv(M, 128), B)](x, y, n, da.contiguous(), dx, dy, M, N, D, **blocks)
        edge_kernel[(triton.cdiv(N, 128), B)](y, x, m, db.contiguous(), dy, dx, N, M, D, **blocks)
        return dx if ctx.needs_input_grad[0] else None, dy if ctx.needs_input_grad[1] else None


def chamfer_distances_autograd(x, y):
    return ChamferDistances.apply(x, y)
