"""Distance of each point of a cloud to the nearest point of another: one half of the Chamfer distance.

Forward    l_i = min over j of |x_i - y_j|^2,  n_i the j that gives it, the first of equal ones
Backward   dx_i = 2 dl_i (x_i - y_n(i)),   dy_j = sum over the i with n_i = j of 2 dl_i (y_j - x_i)

Forward schedule: a program owns a tile of points of x and walks y by tiles, with a running minimum and its
place, and at the end measures to that place; these two are stored, never the N M distances. Differences are
squared as they are: the expanded form |x|^2 - 2 <x, y> + |y|^2 could use a dot, and would lose a small
distance between large numbers.
Backward schedule: dx has one term, read at the saved place. dy sums over whoever chose j, which is data: a
sort of the places, once for a cloud, turns it into a run for each j, and j's owner walks its run, a tile of
points a step. Most points are chosen once or twice, a few outliers by many: those make long runs, where
atomics would queue on one address; and the order of each sum is fixed.

op: chamfer
schedule: index_or_seed_replay, segment_gather
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
def load_points(ptr, i, inside):
    x = tl.load(ptr + 3 * i, mask=inside, other=0.0)
    y = tl.load(ptr + 3 * i + 1, mask=inside, other=0.0)
    return x, y, tl.load(ptr + 3 * i + 2, mask=inside, other=0.0)


@triton.jit
def nearest_kernel(x_ptr, y_ptr, l_ptr, n_ptr, N, M, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    a, b, c = load_points(x_ptr + batch * N * 3, i, i < N)
    best = tl.full([BLOCK_I], float("inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK_I], dtype=tl.int32)
    for start in range(0, M, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        p, q, r = load_points(y_ptr + batch * M * 3, j, j < M)
        p, q, r = a[:, None] - p[None, :], b[:, None] - q[None, :], c[:, None] - r[None, :]
        d = tl.where(j[None, :] < M, p * p + q * q + r * r, float("inf"))
        least = tl.min(d, axis=1)
        where = tl.min(tl.where(d == least[:, None], j[None, :], M), axis=1)
        place = tl.where(least < best, where, place)
        best = tl.where(least < best, least, best)
    p, q, r = load_points(y_ptr + batch * M * 3, place, i < N)  # of equal ones the first alone counts
    p, q, r = a - p, b - q, c - r
    tl.store(l_ptr + batch * N + i, p * p + q * q + r * r, mask=i < N)
    tl.store(n_ptr + batch * N + i, place, mask=i < N)


def nearest_forward(x, y):
    (B, N, _), M = x.shape, y.shape[1]
    if y.shape[0] != B or M < 1:
        raise ValueError(f"clouds {tuple(x.shape)} and {tuple(y.shape)}; the second needs a point")
    distance = torch.empty((B, N), device=x.device, dtype=x.dtype)
    n = torch.empty((B, N), device=x.device, dtype=torch.int32)
    nearest_kernel[(triton.cdiv(N, BLOCKS["BLOCK_I"]), B)](x, y, distance, n, N, M, **BLOCKS)
    return distance, n


@autodiff(inputs_require_grad=(0, 1))
def nearest_distance(x, y):
    """x: float32 (B, N, 3); y: float32 (B, M, 3); gives (B, N)."""
    return nearest_forward(x.contiguous(), y.contiguous())[0]


def reference(x, y):
    return (x[:, :, None] - y[:, None]).pow(2).sum(-1).min(dim=2).values


SWEEP = [{"B": 16, "N": 2048, "M": 2048}, {"B": 3, "N": 5003, "M": 1201}]
SWEEP_CPU = [{"B": 2, "N": 23, "M": 17}, {"B": 1, "N": 40, "M": 90}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N, M = (dims[name] for name in "BNM")
    return tuple(torch.randn(B, size, 3, device=device, dtype=dtype) for size in (N, max(1, M)))


# ---- backward ----


@triton.jit
def dx_kernel(x_ptr, y_ptr, n_ptr, dl_ptr, dx_ptr, points, N, M, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of all clouds
    j = i // N * M + tl.load(n_ptr + i, mask=i < points, other=0)
    a, b, c = load_points(x_ptr, i, i < points)
    p, q, r = load_points(y_ptr, j, i < points)
    g = 2 * tl.load(dl_ptr + i, mask=i < points, other=0.0)
    tl.store(dx_ptr + 3 * i, g * (a - p), mask=i < points)
    tl.store(dx_ptr + 3 * i + 1, g * (b - q), mask=i < points)
    tl.store(dx_ptr + 3 * i + 2, g * (c - r), mask=i < points)


@triton.jit
def dy_kernel(x_ptr, y_ptr, order_ptr, first_ptr, dl_ptr, dy_ptr, BLOCK: tl.constexpr):
    """order: the points of all x by the point of y that they chose, first: where each one's begin."""
    j = tl.program_id(0).to(tl.int64)
    end = tl.load(first_ptr + j + 1)
    p, q, r = tl.load(y_ptr + 3 * j), tl.load(y_ptr + 3 * j + 1), tl.load(y_ptr + 3 * j + 2)
    dp = tl.zeros([BLOCK], dtype=tl.float32)
    dq = tl.zeros([BLOCK], dtype=tl.float32)
    dr = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.load(first_ptr + j), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        i = tl.load(order_ptr + at, mask=at < end, other=0)
        a, b, c = load_points(x_ptr, i, at < end)
        g = 2 * tl.load(dl_ptr + i, mask=at < end, other=0.0)
        dp += g * (p - a)
        dq += g * (q - b)
        dr += g * (r - c)
    tl.store(dy_ptr + 3 * j, tl.sum(dp, axis=0))
    tl.store(dy_ptr + 3 * j + 1, tl.sum(dq, axis=0))
    tl.store(dy_ptr + 3 * j + 2, tl.sum(dr, axis=0))


class NearestDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        distance, n = nearest_forward(x, y)
        ctx.save_for_backward(x, y, n)
        return distance

    @staticmethod
    def backward(ctx, dl):
        x, y, n = ctx.saved_tensors
        (B, N, _), M, dl, dx, dy = x.shape, y.shape[1], dl.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(B * N, 128),)](x, y, n, dl, dx, B * N, N, M, BLOCK=128)
        if ctx.needs_input_grad[1]:
            dy = torch.empty_like(y)
            chosen = n.long() + M * torch.arange(B, device=x.device)[:, None]
            chosen, order = chosen.flatten().sort(stable=True)
            first = torch.searchsorted(chosen, torch.arange(B * M + 1, device=x.device))
            dy_kernel[(B * M,)](x, y, order, first, dl, dy, BLOCK=16)
        return dx, dy


def nearest_distance_autograd(x, y):
    return NearestDistance.apply(x, y)
