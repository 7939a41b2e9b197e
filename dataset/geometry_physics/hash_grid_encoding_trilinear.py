"""Multi-resolution hash encoding of points: features of a neural field, trilinear on grids of growing size.

Forward    at a level of resolution n:  p = n x,  b = floor(p),  t = p - b;  for the corners c in {0, 1}^3
           w_c = prod_a (t_a if c_a else 1 - t_a),  h_c = hash(b + c) mod S;
           y[level] = sum_c w_c table[level, h_c]
Backward   dtable[level, h] = sum over points and corners with h_c = h of w_c dy[level];
           with q_c = <dy[level], table[level, h_c]>:
           dx_a = sum over levels of n sum_c q_c (1 if c_a else -1) times c's other two factors

Forward schedule: a program owns (tile of points, level); a corner is one gather of F neighbouring numbers.
Backward schedule: the table's rows are shared by whoever hashes there, and which points do is data that
changes with every batch: sorting 8 N corners a level would cost more than the gradient. So: atomic adds into
zeros, which are few for one address where the grid is fine; where it is coarse many points share a row, and
the L2 adds them up. dx sums over levels, so there a program owns a tile of points and loops over the levels;
a walk makes q, dx's shares and the table's adds from the same corner.

op: hash_grid
schedule: atomic_accumulate, row_reduce_correct
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 64


@triton.jit
def load_cell(x_ptr, n, axis: tl.constexpr, N, resolution):
    """Lower corner and fraction of a tile of points along one axis."""
    p = tl.load(x_ptr + 3 * n + axis, mask=n < N, other=0.0) * resolution
    corner = tl.floor(p)
    return corner.to(tl.int64), p - corner


@triton.jit
def hash_row(i, j, k, S):
    return ((i * 1) ^ (j * 2654435761) ^ (k * 805459861)) & (S - 1)


@triton.jit
def load_rows(table_ptr, row, n, N, F, BLOCK_F: tl.constexpr):
    f = tl.arange(0, BLOCK_F)
    mask = (n[:, None] < N) & (f[None, :] < F)
    return tl.load(table_ptr + row[:, None] * F + f[None, :], mask=mask, other=0.0)


@triton.jit
def encode_kernel(
    x_ptr, table_ptr, resolution_ptr, y_ptr, N, S, F, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    level, levels = tl.program_id(1), tl.num_programs(1)
    resolution = tl.load(resolution_ptr + level).to(tl.float32)
    i, u = load_cell(x_ptr, n, 0, N, resolution)
    j, v = load_cell(x_ptr, n, 1, N, resolution)
    k, w = load_cell(x_ptr, n, 2, N, resolution)
    table_ptr += level.to(tl.int64) * S * F
    y = tl.zeros([BLOCK, BLOCK_F], dtype=tl.float32)
    for c in tl.static_range(8):
        row = hash_row(i + c // 4, j + c // 2 % 2, k + c % 2, S)
        weight = (u if c // 4 else 1 - u) * (v if c // 2 % 2 else 1 - v) * (w if c % 2 else 1 - w)
        y += weight[:, None] * load_rows(table_ptr, row, n, N, F, BLOCK_F)
    f = tl.arange(0, BLOCK_F)
    out = y_ptr + (n[:, None] * levels + level) * F + f[None, :]
    tl.store(out, y, mask=(n[:, None] < N) & (f[None, :] < F))


@autodiff(inputs_require_grad=(0, 1))
def hash_encode(x, table, resolutions):
    """x: float32 (N, 3), in the unit cube; table: float32 (levels, S, F), S a power of 2; resolutions: int32
    (levels); gives (N, levels * F)."""
    levels, S, F = table.shape
    if S & (S - 1) or resolutions.shape != (levels,):
        raise ValueError(f"a table {tuple(table.shape)} wants a power of 2 for rows and {levels} resolutions")
    x, table, resolutions, N = x.contiguous(), table.contiguous(), resolutions.contiguous(), x.shape[0]
    y = torch.empty((N, levels * F), device=x.device, dtype=x.dtype)
    blocks = {"BLOCK": BLOCK, "BLOCK_F": triton.next_power_of_2(F)}
    encode_kernel[(triton.cdiv(N, BLOCK), levels)](x, table, resolutions, y, N, S, F, **blocks)
    return y


def reference(x, table, resolutions):
    levels, S, _ = table.shape
    features = []
    for level in range(levels):
        p = x * resolutions[level].item()
        b = p.detach().floor()
        t, b, y = p - b, b.long(), 0
        for c in range(8):
            bits = (c // 4, c // 2 % 2, c % 2)
            i, j, k = (b[:, axis] + bits[axis] for axis in range(3))
            row = (i ^ (j * 2654435761) ^ (k * 805459861)) & (S - 1)
            weight = 1
            for axis in range(3):
                weight = weight * (t[:, axis] if bits[axis] else 1 - t[:, axis])
            y = y + weight[:, None] * table[level, row]
        features.append(y)
    return torch.cat(features, dim=1)


SWEEP = [
    {"N": 262144, "levels": 16, "bits": 19, "F": 2},
    {"N": 65537, "levels": 8, "bits": 14, "F": 4},
]
SWEEP_CPU = [{"N": 41, "levels": 3, "bits": 6, "F": 2}, {"N": 70, "levels": 2, "bits": 9, "F": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Resolutions from 16 on, by factors of 1.38, while float32 leaves nine bits for a place in a cell."""
    N, levels = dims["N"], dims["levels"]
    resolutions = (16 * 1.38 ** torch.arange(levels, device=device)).clamp(max=2**14).to(torch.int32)
    table = torch.randn(levels, 2 ** min(dims["bits"], 20), dims["F"], device=device, dtype=dtype)
    return torch.rand(N, 3, device=device, dtype=dtype), table, resolutions


# ---- backward ----


@triton.jit
def encode_backward_kernel(
    x_ptr, table_ptr, resolution_ptr, dy_ptr, dx_ptr, dtable_ptr, N, levels, S, F,
    WANT_TABLE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, BLOCK_F)
    mask = (n[:, None] < N) & (f[None, :] < F)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    dy = tl.zeros([BLOCK], dtype=tl.float32)
    dz = tl.zeros([BLOCK], dtype=tl.float32)
    for level in range(levels):
        resolution = tl.load(resolution_ptr + level).to(tl.float32)
        i, u = load_cell(x_ptr, n, 0, N, resolution)
        j, v = load_cell(x_ptr, n, 1, N, resolution)
        k, w = load_cell(x_ptr, n, 2, N, resolution)
        g = tl.load(dy_ptr + (n[:, None] * levels + level) * F + f[None, :], mask=mask, other=0.0)
        for c in tl.static_range(8):
            row = hash_row(i + c // 4, j + c // 2 % 2, k + c % 2, S)
            wu, wv, ww = u if c // 4 else 1 - u, v if c // 2 % 2 else 1 - v, w if c % 2 else 1 - w
            q = resolution * tl.sum(g * load_rows(table_ptr, row, n, N, F, BLOCK_F), axis=1)
            dx += (q if c // 4 else -q) * wv * ww
            dy += (q if c // 2 % 2 else -q) * wu * ww
            dz += (q if c % 2 else -q) * wu * wv
            if WANT_TABLE:
                share = (wu * wv * ww)[:, None] * g
                tl.atomic_add(dtable_ptr + row[:, None] * F + f[None, :], share, mask=mask, sem="relaxed")
        table_ptr += S * F
        dtable_ptr += S * F
    tl.store(dx_ptr + 3 * n, dx, mask=n < N)
    tl.store(dx_ptr + 3 * n + 1, dy, mask=n < N)
    tl.store(dx_ptr + 3 * n + 2, dz, mask=n < N)


class HashEncode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, resolutions):
        x, table, resolutions = x.contiguous(), table.contiguous(), resolutions.contiguous()
        ctx.save_for_backward(x, table, resolutions)
        return hash_encode(x, table, resolutions)

    @staticmethod
    def backward(ctx, dy):
        x, table, resolutions = ctx.saved_tensors
        (levels, S, F), N, needs = table.shape, x.shape[0], ctx.needs_input_grad
        dx, dtable = torch.empty_like(x), torch.zeros_like(table)
        encode_backward_kernel[(triton.cdiv(N, BLOCK),)](
            x, table, resolutions, dy.contiguous(), dx, dtable, N, levels, S, F,
            WANT_TABLE=needs[1], BLOCK=BLOCK, BLOCK_F=triton.next_power_of_2(F),
        )  # fmt: skip
        return dx if needs[0] else None, dtable if needs[1] else None, None


def hash_encode_autograd(x, table, resolutions):
    return HashEncode.apply(x, table, resolutions)
