"""Linear layer on packed 4-bit weights, with a scale and a zero point a group of input channels.

Forward    W_kn = (q_kn - z_gn) s_gn  with g = k // size and q from 0 to 15,   Y = X W
Backward   dX = dY W^T,   with dW = X^T dY:   ds_gn = sum_{k in g} dW_kn (q_kn - z_gn),
           dz_gn = -s_gn sum_{k in g} dW_kn;   q has no gradient

Forward schedule: eight numbers of one column lie in an int32, the first in the lowest bits. A program owns an
output tile and walks the groups: a group is one step of the product, so its s and z are one row each, and a
weight tile is unpacked in registers, by one shift a lane.
Backward schedule: dX has the same inner step with the roles swapped: a program owns (row tile, group) and
walks the columns, unpacking the tile that it needs transposed. s and z are read by all rows, so each (group,
column tile) gets an owner that walks the rows with its piece of dW, size x columns, in registers. Both
contractions of dW with the group happen there, at the end, so that dW, which is as large as the weight would
be without packing, never exists in memory, and the unpacked weight neither.

op: int4_linear
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x, s):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_G = max(16, triton.next_power_of_2(x.shape[1] // max(1, s.shape[0])))
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64, "BLOCK_G": BLOCK_G}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def unpack_tile(packed_ptr, s_ptr, z_ptr, g, k, n, SIZE, N):
    """q - z and s of a group's channels k, from 0, by columns n; lanes outside have q - z = 0."""
    mask = (k[:, None] < SIZE) & (n[None, :] < N)
    word = tl.load(packed_ptr + ((g * SIZE + k) // 8)[:, None] * N + n[None, :], mask=mask, other=0)
    q = (word >> ((k % 8) * 4)[:, None]) & 15
    z = tl.load(z_ptr + g * N + n, mask=n < N, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + g * N + n, mask=n < N, other=0.0).to(tl.float32)
    return tl.where(mask, q.to(tl.float32) - z[None, :], 0.0), s


@triton.jit
def linear_kernel(
    x_ptr, packed_ptr, s_ptr, z_ptr, y_ptr, M, N, K, SIZE,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_G)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for g in range(K // SIZE):
        x = load_tile(x_ptr + g * SIZE, m, k, M, SIZE, K)
        centred, s = unpack_tile(packed_ptr, s_ptr, z_ptr, g, k, n, SIZE, N)
        y = tl.dot(x, (centred * s[None, :]).to(x.dtype), y, input_precision=PRECISION)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def group_size(x, packed, s, z):
    K, (groups, N) = x.shape[1], s.shape
    if z.shape != s.shape or packed.shape != (K // 8, N) or K % 8 or groups == 0 or K % groups:
        raise ValueError(f"packed, s and z do not fit {K} input channels in {groups} groups")
    size = K // groups
    if size % 8 or not 0 < size <= 128:
        raise ValueError(f"a group of {size} channels: it must be a multiple of 8, at most 128")
    return size


@autodiff(inputs_require_grad=(0, 2, 3))
def int4_linear(x, packed, s, z):
    """x: (M, K); packed: int32 (K / 8, N); s, z: (groups, N), of K / groups channels each."""
    size = group_size(x, packed, s, z)
    x, packed, s, z = (tensor.contiguous() for tensor in (x, packed, s, z))
    (M, K), N, tiles = x.shape, s.shape[1], tiling(x, s)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    linear_kernel[grid](x, packed, s, z, y, M, N, K, size, **tiles)
    return y


def reference(x, packed, s, z):
    size = x.shape[1] // s.shape[0]
    shifts = torch.arange(0, 32, 4, device=x.device, dtype=packed.dtype)
    q = ((packed[:, None, :] >> shifts[:, None]) & 15).reshape(x.shape[1], -1)
    return x @ ((q - z.repeat_interleave(size, dim=0)) * s.repeat_interleave(size, dim=0))


SWEEP = [
    {"M": 4096, "groups": 32, "size": 128, "N": 4096},
    {"M": 1021, "groups": 64, "size": 64, "N": 11008},
]
SWEEP_CPU = [
    {"M": 19, "groups": 4, "size": 16, "N": 32},
    {"M": 70, "groups": 3, "size": 24, "N": 45},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, groups, size, N = (dims[name] for name in ("M", "groups", "size", "N"))
    x = torch.randn(M, groups * size, device=device, dtype=dtype)
    limits = (-(2**31), 2**31)
    packed = torch.randint(*limits, (groups * size // 8, N), device=device, dtype=torch.int32)
    s = (0.5 + torch.rand(groups, N, device=device, dtype=dtype)) / 8 / max(1, groups * size) ** 0.5
    return x, packed, s, 7.5 + torch.rand(groups, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def input_kernel(
    dy_ptr, packed_ptr, s_ptr, z_ptr, dx_ptr, M, N, K, SIZE,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.program_id(1)
    k = tl.arange(0, BLOCK_G)
    dx = tl.zeros([BLOCK, BLOCK_G], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, n, M, N, N)
        centred, s = unpack_tile(packed_ptr, s_ptr, z_ptr, g, k, n, SIZE, N)
        w = (centred * s[None, :]).to(dy.dtype)
        dx = tl.dot(dy, tl.trans(w), dx, input_precision=PRECISION)
    mask = (m[:, None] < M) & (k[None, :] < SIZE)
    dx_offs = m[:, None] * K + g * SIZE + k[None, :]
    tl.store(dx_ptr + dx_offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_kernel(
    x_ptr, dy_ptr, packed_ptr, s_ptr, z_ptr, ds_ptr, dz_ptr, M, N, K, SIZE,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """ds and dz of a group, from its piece of dW; channels past the group have x = 0, and so dW = 0."""
    g = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_G)
    dw = tl.zeros([BLOCK_G, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK).to(tl.int64)
        x = load_tile(x_ptr + g * SIZE, m, k, M, SIZE, K)
        dy = load_tile(dy_ptr, m, n, M, N, N)
        dw = tl.dot(tl.trans(x), dy, dw, input_precision=PRECISION)
    centred, s = unpack_tile(packed_ptr, s_ptr, z_ptr, g, k, n, SIZE, N)
    ds, dz = tl.sum(dw * centred, axis=0), -s * tl.sum(dw, axis=0)
    tl.store(ds_ptr + g * N + n, ds.to(ds_ptr.dtype.element_ty), mask=n < N)
    tl.store(dz_ptr + g * N + n, dz.to(dz_ptr.dtype.element_ty), mask=n < N)


class Int4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, s, z):
        x, packed, s, z = (tensor.contiguous() for tensor in (x, packed, s, z))
        ctx.save_for_backward(x, packed, s, z)
        return int4_linear(x, packed, s, z)

    @staticmethod
    def backward(ctx, dy):
        x, packed, s, z = ctx.saved_tensors
        dy = dy.contiguous()
        (M, K), (groups, N), tiles = x.shape, s.shape, tiling(x, s)
        sizes = (M, N, K, K // groups)
        dx = ds = dz = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, tiles["BLOCK"]), groups)
            input_kernel[grid](dy, packed, s, z, dx, *sizes, **tiles)
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            ds, dz = torch.empty_like(s), torch.empty_like(z)
            grid = (groups, triton.cdiv(N, tiles["BLOCK"]))
            group_kernel[grid](x, dy, packed, s, z, ds, dz, *sizes, **tiles)
        return dx, None, ds if ctx.needs_input_grad[2] else None, dz if ctx.needs_input_grad[3] else None


def int4_linear_autograd(x, packed, s, z):
    return Int4Linear.apply(x, packed, s, z)
