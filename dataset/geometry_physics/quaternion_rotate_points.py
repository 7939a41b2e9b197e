"""Rotation of point clouds, each by a quaternion of its own that need not have unit length.

Forward    q = a Q,  a = (|Q|^2 + eps)^(-1/2),  q = (w, c);   t = c x v,  v' = v + 2 w t + 2 c x t
Backward   with g = dv': dv is the rotation the other way,  g - 2 w (c x g) + 2 c x (c x g);
           dw = 2 sum <g, t>,   dc = 2 sum (w v x g + t x g + v x (g x c)) over the frame's points, from
           <g, c x t> = <c, t x g> and <g x c, dc x v> = <dc, v x (g x c)>;
           dQ = a (dq - q <q, dq>)

Forward schedule: a program owns (frame, tile of points); no rotation matrix is made.
Backward schedule: dv keeps that ownership. dQ is a sum over all points of a frame, which may be one cloud of
a million: each program adds up its tile's four numbers while v and g are in registers and stores them in a
slot; a second kernel, an owner a frame, adds the slots. Normalising is linear in dq, so its projection waits
for the sum and is made once a frame by that same kernel.

op: quat_rotate
schedule: partials_then_reduce, row_reduce_correct, same_tile_pointwise
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def unit(q_ptr, frame, eps):
    w, x = tl.load(q_ptr + 4 * frame), tl.load(q_ptr + 4 * frame + 1)
    y, z = tl.load(q_ptr + 4 * frame + 2), tl.load(q_ptr + 4 * frame + 3)
    a = tl.rsqrt(w * w + x * x + y * y + z * z + eps)
    return a, a * w, a * x, a * y, a * z


@triton.jit
def load_points(ptr, p, mask):
    x = tl.load(ptr + 3 * p, mask=mask, other=0.0)
    y = tl.load(ptr + 3 * p + 1, mask=mask, other=0.0)
    return x, y, tl.load(ptr + 3 * p + 2, mask=mask, other=0.0)


@triton.jit
def store_points(ptr, p, mask, x, y, z):
    tl.store(ptr + 3 * p, x, mask=mask)
    tl.store(ptr + 3 * p + 1, y, mask=mask)
    tl.store(ptr + 3 * p + 2, z, mask=mask)


@triton.jit
def cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def rotate_kernel(q_ptr, v_ptr, out_ptr, P, eps, BLOCK: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, w, cx, cy, cz = unit(q_ptr, frame, eps)
    x, y, z = load_points(v_ptr + frame * P * 3, p, p < P)
    tx, ty, tz = cross(cx, cy, cz, x, y, z)
    ux, uy, uz = cross(cx, cy, cz, tx, ty, tz)
    x, y, z = x + 2 * (w * tx + ux), y + 2 * (w * ty + uy), z + 2 * (w * tz + uz)
    store_points(out_ptr + frame * P * 3, p, p < P, x, y, z)


BLOCK = 256


@autodiff(inputs_require_grad=(0, 1))
def rotate_points(q, v, eps=1e-12):
    """q: float32 (F, 4), the real part first; v: float32 (F, P, 3)."""
    if q.shape != (v.shape[0], 4) or v.shape[2] != 3:
        raise ValueError(f"quaternions {tuple(q.shape)} do not fit points {tuple(v.shape)}")
    q, v = q.contiguous(), v.contiguous()
    (F, P, _), out = v.shape, torch.empty_like(v)
    rotate_kernel[(F, triton.cdiv(P, BLOCK))](q, v, out, P, eps, BLOCK=BLOCK)
    return out


def reference(q, v, eps=1e-12):
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + eps)
    w, c = q[:, None, :1], q[:, None, 1:].expand_as(v)
    t = torch.linalg.cross(c, v)
    return v + 2 * w * t + 2 * torch.linalg.cross(c, t)


SWEEP = [{"F": 64, "P": 16384}, {"F": 513, "P": 1021}]
SWEEP_CPU = [{"F": 3, "P": 300}, {"F": 9, "P": 45}]


def make_args(dims, device="cuda", dtype=torch.float32):
    q = torch.randn(dims["F"], 4, device=device, dtype=dtype)
    return q, torch.randn(dims["F"], dims["P"], 3, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def rotate_backward_kernel(q_ptr, v_ptr, g_ptr, dv_ptr, slots_ptr, P, eps, BLOCK: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, w, cx, cy, cz = unit(q_ptr, frame, eps)
    x, y, z = load_points(v_ptr + frame * P * 3, p, p < P)
    gx, gy, gz = load_points(g_ptr + frame * P * 3, p, p < P)
    sx, sy, sz = cross(cx, cy, cz, gx, gy, gz)  # c x g
    ux, uy, uz = cross(cx, cy, cz, sx, sy, sz)
    dx, dy, dz = gx + 2 * (ux - w * sx), gy + 2 * (uy - w * sy), gz + 2 * (uz - w * sz)
    store_points(dv_ptr + frame * P * 3, p, p < P, dx, dy, dz)
    tx, ty, tz = cross(cx, cy, cz, x, y, z)
    # w v x g + t x g is one product, and g x c = -(c x g)
    ax, ay, az = cross(w * x + tx, w * y + ty, w * z + tz, gx, gy, gz)
    bx, by, bz = cross(x, y, z, sx, sy, sz)
    slot = slots_ptr + (frame * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(slot, 2 * tl.sum(gx * tx + gy * ty + gz * tz, axis=0))
    tl.store(slot + 1, 2 * tl.sum(ax - bx, axis=0))
    tl.store(slot + 2, 2 * tl.sum(ay - by, axis=0))
    tl.store(slot + 3, 2 * tl.sum(az - bz, axis=0))


@triton.jit
def quaternion_kernel(q_ptr, slots_ptr, dq_ptr, tiles, eps, BLOCK: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, 4)
    total = tl.zeros([4], dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        at = slots_ptr + (frame * tiles + tile[:, None]) * 4 + part[None, :]
        total += tl.sum(tl.load(at, mask=tile[:, None] < tiles, other=0.0), axis=0)
    q = tl.load(q_ptr + 4 * frame + part)
    a = tl.rsqrt(tl.sum(q * q, axis=0) + eps)
    q *= a
    tl.store(dq_ptr + 4 * frame + part, a * (total - q * tl.sum(q * total, axis=0)))


class RotatePoints(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, v, eps):
        q, v = q.contiguous(), v.contiguous()
        ctx.save_for_backward(q, v)
        ctx.eps = eps
        return rotate_points(q, v, eps)

    @staticmethod
    def backward(ctx, g):
        q, v = ctx.saved_tensors
        (F, P, _), needs = v.shape, ctx.needs_input_grad
        tiles = triton.cdiv(P, BLOCK)
        dv, dq = torch.empty_like(v), torch.empty_like(q)
        slots = torch.empty((F, tiles, 4), device=v.device, dtype=torch.float32)
        rotate_backward_kernel[(F, tiles)](q, v, g.contiguous(), dv, slots, P, ctx.eps, BLOCK=BLOCK)
        if needs[0]:
            quaternion_kernel[(F,)](q, slots, dq, tiles, ctx.eps, BLOCK=64)
        return dq if needs[0] else None, dv if needs[1] else None, None


def rotate_points_autograd(q, v, eps=1e-12):
    return RotatePoints.apply(q, v, eps)
