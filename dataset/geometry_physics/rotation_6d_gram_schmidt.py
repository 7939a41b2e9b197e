"""Rotation matrices from six numbers each, the continuous representation that pose networks regress.

Forward    x and y the halves of six numbers;  b = x / |x|,  s = <b, y>,  u = y - s b,  c = u / |u|,
           d = b x c;  R has the rows b, c, d, and |v| is (<v, v> + eps)^(1/2)
Backward   with the rows B, C, D of dR, in the order in which the steps are undone:
           d = b x c:     B += c x D,  C += D x b
           c = u / |u|:   du = (C - c <c, C>) / |u|
           u = y - s b:   h = <b, du>,  dy = du - h b,  B -= s du + h y
           b = x / |x|:   dx = (B - b <b, B>) / |x|

Forward schedule: a lane owns a sample; the whole chain is in its registers.
Backward schedule: a reverse walk of the same chain by the same lane. Nothing is saved: the steps cost two
square roots and a dozen products, and saving b, c and the lengths would be more traffic than the six inputs.
The forward's values are made first, in order, then the adjoint steps use them from last to first.

op: rot6d
schedule: same_tile_pointwise, adjoint_solve
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_vector(ptr, n, N, WIDTH: tl.constexpr):
    x = tl.load(ptr + WIDTH * n, mask=n < N, other=0.0)
    y = tl.load(ptr + WIDTH * n + 1, mask=n < N, other=0.0)
    return x, y, tl.load(ptr + WIDTH * n + 2, mask=n < N, other=0.0)


@triton.jit
def store_vector(ptr, n, N, x, y, z, WIDTH: tl.constexpr):
    tl.store(ptr + WIDTH * n, x, mask=n < N)
    tl.store(ptr + WIDTH * n + 1, y, mask=n < N)
    tl.store(ptr + WIDTH * n + 2, z, mask=n < N)


@triton.jit
def dot(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def orthonormalise(x0, x1, x2, y0, y1, y2, eps):
    """1 / |x|, the rows b and c, s, and 1 / |u|."""
    p = tl.rsqrt(dot(x0, x1, x2, x0, x1, x2) + eps)
    b0, b1, b2 = p * x0, p * x1, p * x2
    s = dot(b0, b1, b2, y0, y1, y2)
    u0, u1, u2 = y0 - s * b0, y1 - s * b1, y2 - s * b2
    r = tl.rsqrt(dot(u0, u1, u2, u0, u1, u2) + eps)
    return p, b0, b1, b2, s, r, r * u0, r * u1, r * u2


@triton.jit
def rotation_kernel(a_ptr, out_ptr, N, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x0, x1, x2 = load_vector(a_ptr, n, N, 6)
    y0, y1, y2 = load_vector(a_ptr + 3, n, N, 6)
    _, b0, b1, b2, _, _, c0, c1, c2 = orthonormalise(x0, x1, x2, y0, y1, y2, eps)
    d0, d1, d2 = cross(b0, b1, b2, c0, c1, c2)
    store_vector(out_ptr, n, N, b0, b1, b2, 9)
    store_vector(out_ptr + 3, n, N, c0, c1, c2, 9)
    store_vector(out_ptr + 6, n, N, d0, d1, d2, 9)


@autodiff(inputs_require_grad=(0,))
def rotation_from_6d(a, eps=1e-12):
    """a: float32 (N, 6); gives (N, 3, 3)."""
    a = a.contiguous()
    N = a.shape[0]
    out = torch.empty((N, 3, 3), device=a.device, dtype=a.dtype)
    rotation_kernel[(triton.cdiv(N, 128),)](a, out, N, eps, BLOCK=128)
    return out


def reference(a, eps=1e-12):
    def unit(v):
        return v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) + eps)

    b = unit(a[:, :3])
    c = unit(a[:, 3:] - (b * a[:, 3:]).sum(-1, keepdim=True) * b)
    return torch.stack([b, c, torch.linalg.cross(b, c)], dim=1)


SWEEP = [{"N": 4000000}, {"N": 250007}]
SWEEP_CPU = [{"N": 101}, {"N": 257}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], 6, device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def rotation_backward_kernel(a_ptr, dout_ptr, da_ptr, N, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x0, x1, x2 = load_vector(a_ptr, n, N, 6)
    y0, y1, y2 = load_vector(a_ptr + 3, n, N, 6)
    p, b0, b1, b2, s, r, c0, c1, c2 = orthonormalise(x0, x1, x2, y0, y1, y2, eps)
    B0, B1, B2 = load_vector(dout_ptr, n, N, 9)
    C0, C1, C2 = load_vector(dout_ptr + 3, n, N, 9)
    D0, D1, D2 = load_vector(dout_ptr + 6, n, N, 9)
    t0, t1, t2 = cross(c0, c1, c2, D0, D1, D2)
    B0, B1, B2 = B0 + t0, B1 + t1, B2 + t2
    t0, t1, t2 = cross(D0, D1, D2, b0, b1, b2)
    C0, C1, C2 = C0 + t0, C1 + t1, C2 + t2
    along = dot(c0, c1, c2, C0, C1, C2)
    u0, u1, u2 = r * (C0 - c0 * along), r * (C1 - c1 * along), r * (C2 - c2 * along)
    h = dot(b0, b1, b2, u0, u1, u2)
    store_vector(da_ptr + 3, n, N, u0 - h * b0, u1 - h * b1, u2 - h * b2, 6)
    B0, B1, B2 = B0 - s * u0 - h * y0, B1 - s * u1 - h * y1, B2 - s * u2 - h * y2
    along = dot(b0, b1, b2, B0, B1, B2)
    store_vector(da_ptr, n, N, p * (B0 - b0 * along), p * (B1 - b1 * along), p * (B2 - b2 * along), 6)


class RotationFrom6D(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, eps):
        a = a.contiguous()
        ctx.save_for_backward(a)
        ctx.eps = eps
        return rotation_from_6d(a, eps)

    @staticmethod
    def backward(ctx, dout):
        (a,) = ctx.saved_tensors
        N = a.shape[0]
        da = torch.empty_like(a)
        rotation_backward_kernel[(triton.cdiv(N, 128),)](a, dout.contiguous(), da, N, ctx.eps, BLOCK=128)
        return da, None


def rotation_from_6d_autograd(a, eps=1e-12):
    return RotationFrom6D.apply(a, eps)
