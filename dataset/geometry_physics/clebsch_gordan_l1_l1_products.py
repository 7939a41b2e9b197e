"""Tensor product of vector features: scalar, vector and rank-2 part, each with weights for its channels.

Forward    for vectors u, v of each (edge, channel), in the order x, y, z, and weights w of each channel:
           s = w_0 <u, v> / sqrt 3,   t = w_1 (u x v) / sqrt 2,   and of the symmetric traceless part
           q = w_2 (a_xy, a_yz, a_xz, (2 a_zz - a_xx - a_yy) / sqrt 12, (a_xx - a_yy) / 2),
           a_ij = (u_i v_j + u_j v_i) / sqrt 2:  9 numbers, and for w = 1 an orthonormal change of basis of
           u (x) v, so that |s|^2 + |t|^2 + |q|^2 = |u|^2 |v|^2
Backward   the change of basis turned round: N = the 3 x 3 matrix that w_0 ds, w_1 dt and w_2 dq stand for;
           du = N v,  dv = N^T u;   dw_l = sum over edges of <the l-part for w = 1, its gradient>

Forward schedule: a program owns (tile of edges, tile of channels), channels contiguous; the coefficients
are constants in straight code, since most of a table of 3 x 3 x 9 would be zeros.
Backward schedule: du and dv are local: N's nine entries are made once in registers, and two products with
them give both, where the chain rule path by path would make each term of N twice. dw sums over all edges:
each program walks a part of the edges with three sums a channel in registers, and stores them as a slot; a
second kernel adds the slots.

op: tensor_product
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 3
dtypes: fp32
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


R2 = tl.constexpr(math.sqrt(1 / 2))
R3 = tl.constexpr(math.sqrt(1 / 3))
R6 = tl.constexpr(math.sqrt(1 / 6))
EDGES, CHANNELS = 8, 64


@triton.jit
def load_vectors(ptr, offs, mask, C):
    """Three numbers, C apart."""
    x = tl.load(ptr + offs, mask=mask, other=0.0)
    y = tl.load(ptr + offs + C, mask=mask, other=0.0)
    return x, y, tl.load(ptr + offs + 2 * C, mask=mask, other=0.0)


@triton.jit
def store_vectors(ptr, offs, mask, C, x, y, z):
    tl.store(ptr + offs, x, mask=mask)
    tl.store(ptr + offs + C, y, mask=mask)
    tl.store(ptr + offs + 2 * C, z, mask=mask)


@triton.jit
def parts(ux, uy, uz, vx, vy, vz):
    """The nine numbers for weights of 1."""
    s = R3 * (ux * vx + uy * vy + uz * vz)
    tx, ty, tz = R2 * (uy * vz - uz * vy), R2 * (uz * vx - ux * vz), R2 * (ux * vy - uy * vx)
    xy, yz, xz = R2 * (ux * vy + uy * vx), R2 * (uy * vz + uz * vy), R2 * (ux * vz + uz * vx)
    long, flat = R6 * (2 * uz * vz - ux * vx - uy * vy), R2 * (ux * vx - uy * vy)
    return s, tx, ty, tz, xy, yz, xz, long, flat


@triton.jit
def product_kernel(u_ptr, v_ptr, w_ptr, out_ptr, E, C, EDGES: tl.constexpr, CHANNELS: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (e[:, None] < E) & (c[None, :] < C)
    offs = e[:, None] * 3 * C + c[None, :]
    ux, uy, uz = load_vectors(u_ptr, offs, mask, C)
    vx, vy, vz = load_vectors(v_ptr, offs, mask, C)
    w0, w1, w2 = load_vectors(w_ptr, c[None, :], c[None, :] < C, C)
    s, tx, ty, tz, xy, yz, xz, long, flat = parts(ux, uy, uz, vx, vy, vz)
    out = e[:, None] * 9 * C + c[None, :]
    store_vectors(out_ptr, out, mask, C, w0 * s, w1 * tx, w1 * ty)
    store_vectors(out_ptr, out + 3 * C, mask, C, w1 * tz, w2 * xy, w2 * yz)
    store_vectors(out_ptr, out + 6 * C, mask, C, w2 * xz, w2 * long, w2 * flat)


@autodiff(inputs_require_grad=(0, 1, 2))
def vector_product(u, v, w):
    """u, v: float32 (E, 3, C); w: float32 (3, C); gives (E, 9, C): s, t and q."""
    E, _, C = u.shape
    if v.shape != u.shape or w.shape != (3, C):
        raise ValueError(f"u {tuple(u.shape)}, v {tuple(v.shape)} and w {tuple(w.shape)} do not fit")
    out = torch.empty((E, 9, C), device=u.device, dtype=u.dtype)
    product_kernel[(triton.cdiv(E, EDGES), triton.cdiv(C, CHANNELS))](
        u.contiguous(), v.contiguous(), w.contiguous(), out, E, C, EDGES=EDGES, CHANNELS=CHANNELS
    )
    return out


def reference(u, v, w):
    m = u[:, :, None] * v[:, None]  # (E, 3, 3, C)
    a = (m + m.transpose(1, 2)) / math.sqrt(2)
    s = (m[:, 0, 0] + m[:, 1, 1] + m[:, 2, 2])[:, None] / math.sqrt(3)
    t = torch.linalg.cross(u, v, dim=1) / math.sqrt(2)
    long = (2 * a[:, 2, 2] - a[:, 0, 0] - a[:, 1, 1]) / math.sqrt(12)
    q = torch.stack([a[:, 0, 1], a[:, 1, 2], a[:, 0, 2], long, (a[:, 0, 0] - a[:, 1, 1]) / 2], dim=1)
    return torch.cat([w[0] * s, w[1] * t, w[2] * q], dim=1)


SWEEP = [{"E": 65536, "C": 128}, {"E": 10007, "C": 200}]
SWEEP_CPU = [{"E": 45, "C": 20}, {"E": 19, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    E, C = dims["E"], dims["C"]
    u, v = (torch.randn(E, 3, C, device=device, dtype=dtype) for _ in range(2))
    return u, v, torch.randn(3, C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def product_backward_kernel(
    u_ptr, v_ptr, w_ptr, g_ptr, du_ptr, dv_ptr, slots_ptr, E, C, part,
    EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    w0, w1, w2 = load_vectors(w_ptr, c[None, :], c[None, :] < C, C)
    dw0 = tl.zeros([EDGES, CHANNELS], dtype=tl.float32)
    dw1 = tl.zeros([EDGES, CHANNELS], dtype=tl.float32)
    dw2 = tl.zeros([EDGES, CHANNELS], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, E), EDGES):
        e = start + tl.arange(0, EDGES)
        mask = (e[:, None] < E) & (c[None, :] < C)
        offs, out = e[:, None] * 3 * C + c[None, :], e[:, None] * 9 * C + c[None, :]
        ux, uy, uz = load_vectors(u_ptr, offs, mask, C)
        vx, vy, vz = load_vectors(v_ptr, offs, mask, C)
        gs, gx, gy = load_vectors(g_ptr, out, mask, C)
        gz, gxy, gyz = load_vectors(g_ptr, out + 3 * C, mask, C)
        gxz, glong, gflat = load_vectors(g_ptr, out + 6 * C, mask, C)
        s, tx, ty, tz, xy, yz, xz, long, flat = parts(ux, uy, uz, vx, vy, vz)
        dw0 += s * gs
        dw1 += tx * gx + ty * gy + tz * gz
        dw2 += xy * gxy + yz * gyz + xz * gxz + long * glong + flat * gflat
        trace, tall, wide = R3 * w0 * gs, R6 * w2 * glong, R2 * w2 * gflat
        nxx, nyy, nzz = trace - tall + wide, trace - tall - wide, trace + 2 * tall
        nxy, nyx = R2 * (w2 * gxy + w1 * gz), R2 * (w2 * gxy - w1 * gz)
        nyz, nzy = R2 * (w2 * gyz + w1 * gx), R2 * (w2 * gyz - w1 * gx)
        nzx, nxz = R2 * (w2 * gxz + w1 * gy), R2 * (w2 * gxz - w1 * gy)
        dx, dy = nxx * vx + nxy * vy + nxz * vz, nyx * vx + nyy * vy + nyz * vz
        store_vectors(du_ptr, offs, mask, C, dx, dy, nzx * vx + nzy * vy + nzz * vz)
        dx, dy = nxx * ux + nyx * uy + nzx * uz, nxy * ux + nyy * uy + nzy * uz
        store_vectors(dv_ptr, offs, mask, C, dx, dy, nxz * ux + nyz * uy + nzz * uz)
    own = slots_ptr + slot * 3 * C + c
    tl.store(own, tl.sum(dw0, axis=0), mask=c < C)
    tl.store(own + C, tl.sum(dw1, axis=0), mask=c < C)
    tl.store(own + 2 * C, tl.sum(dw2, axis=0), mask=c < C)


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, count, size, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([SLOTS, BLOCK], dtype=tl.float32)
    for start in range(0, count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        mask = (slot[:, None] < count) & (i[None, :] < size)
        total += tl.load(slots_ptr + slot[:, None] * size + i[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + i, tl.sum(total, axis=0), mask=i < size)


class VectorProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, v, w):
        u, v, w = u.contiguous(), v.contiguous(), w.contiguous()
        ctx.save_for_backward(u, v, w)
        return vector_product(u, v, w)

    @staticmethod
    def backward(ctx, g):
        u, v, w = ctx.saved_tensors
        (E, _, C), needs = u.shape, ctx.needs_input_grad
        part = triton.cdiv(max(1, E), 256 * EDGES) * EDGES  # 256 parts at most
        count = triton.cdiv(E, part)
        du, dv, dw = torch.empty_like(u), torch.empty_like(v), torch.empty_like(w)
        slots = torch.empty((count, 3, C), device=u.device, dtype=torch.float32)
        product_backward_kernel[(count, triton.cdiv(C, CHANNELS))](
            u, v, w, g.contiguous(), du, dv, slots, E, C, part, EDGES=EDGES, CHANNELS=CHANNELS
        )
        if needs[2]:
            grid = (triton.cdiv(3 * C, 64),)
            sum_slots_kernel[grid](slots, dw, count, 3 * C, SLOTS=32, BLOCK=64)
        return du if needs[0] else None, dv if needs[1] else None, dw if needs[2] else None


def vector_product_autograd(u, v, w):
    return VectorProduct.apply(u, v, w)
