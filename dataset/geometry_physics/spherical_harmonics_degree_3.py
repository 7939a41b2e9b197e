"""Real spherical harmonics of directions, up to degree 3: the angular features of an equivariant network.

Forward    u = a x,  a = (|x|^2 + eps)^(-1/2);  Y_k(u), k = 0..15, orthonormal polynomials of (x, y, z) of u
Backward   du = sum_k dY_k grad Y_k(u), polynomials of one degree less; d(a x) = a (dx - u <u, dx>) has a
           symmetric matrix, so  dx = a (du - u <u, du>): what stretches x changes nothing

Forward schedule: a lane owns a point and makes all sixteen polynomials from the same few products.
Backward schedule: the same lane reads the three coordinates and its sixteen dY, and contracts each dY with
the gradient of its polynomial as it arrives: the 16 x 3 Jacobian exists one row at a time, in registers. The
projection is made once, on du, not sixteen times on the rows of the Jacobian. Nothing is saved; u costs one
square root, and reading it would cost what reading x costs.

op: spherical_harmonics
schedule: same_tile_pointwise, row_reduce_correct
difficulty: 3
dtypes: fp32
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


C0 = tl.constexpr(math.sqrt(1 / (4 * math.pi)))
C1 = tl.constexpr(math.sqrt(3 / (4 * math.pi)))
C2 = tl.constexpr(math.sqrt(15 / (4 * math.pi)))  # xy, yz, xz; half of it for x^2 - y^2
C20 = tl.constexpr(math.sqrt(5 / (16 * math.pi)))
C33 = tl.constexpr(math.sqrt(35 / (32 * math.pi)))
C32 = tl.constexpr(math.sqrt(105 / (4 * math.pi)))  # xyz; half of it for z (x^2 - y^2)
C31 = tl.constexpr(math.sqrt(21 / (32 * math.pi)))
C30 = tl.constexpr(math.sqrt(7 / (16 * math.pi)))


@triton.jit
def direction(x_ptr, n, N, eps):
    x = tl.load(x_ptr + 3 * n, mask=n < N, other=0.0)
    y = tl.load(x_ptr + 3 * n + 1, mask=n < N, other=0.0)
    z = tl.load(x_ptr + 3 * n + 2, mask=n < N, other=0.0)
    a = tl.rsqrt(x * x + y * y + z * z + eps)
    return a, a * x, a * y, a * z


@triton.jit
def harmonics_kernel(x_ptr, out_ptr, N, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    _, x, y, z = direction(x_ptr, n, N, eps)
    xx, yy, zz = x * x, y * y, z * z
    at = out_ptr + 16 * n
    tl.store(at, x * 0 + C0, mask=mask)
    tl.store(at + 1, C1 * y, mask=mask)
    tl.store(at + 2, C1 * z, mask=mask)
    tl.store(at + 3, C1 * x, mask=mask)
    tl.store(at + 4, C2 * x * y, mask=mask)
    tl.store(at + 5, C2 * y * z, mask=mask)
    tl.store(at + 6, C20 * (2 * zz - xx - yy), mask=mask)
    tl.store(at + 7, C2 * x * z, mask=mask)
    tl.store(at + 8, C2 / 2 * (xx - yy), mask=mask)
    tl.store(at + 9, C33 * y * (3 * xx - yy), mask=mask)
    tl.store(at + 10, C32 * x * y * z, mask=mask)
    tl.store(at + 11, C31 * y * (4 * zz - xx - yy), mask=mask)
    tl.store(at + 12, C30 * z * (2 * zz - 3 * xx - 3 * yy), mask=mask)
    tl.store(at + 13, C31 * x * (4 * zz - xx - yy), mask=mask)
    tl.store(at + 14, C32 / 2 * z * (xx - yy), mask=mask)
    tl.store(at + 15, C33 * x * (xx - 3 * yy), mask=mask)


@autodiff(inputs_require_grad=(0,))
def spherical_harmonics(x, eps=1e-12):
    """x: float32 (N, 3), vectors of any length; gives (N, 16), by degree and in it from m = -l to l."""
    x = x.contiguous()
    N = x.shape[0]
    out = torch.empty((N, 16), device=x.device, dtype=x.dtype)
    harmonics_kernel[(triton.cdiv(N, 128),)](x, out, N, eps, BLOCK=128)
    return out


def reference(x, eps=1e-12):
    x, y, z = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)).unbind(-1)
    xx, yy, zz = x * x, y * y, z * z
    c = [math.sqrt(v / math.pi) for v in (1 / 4, 3 / 4, 15 / 4, 5 / 16, 35 / 32, 105 / 4, 21 / 32, 7 / 16)]
    degrees_0_1 = [c[0] + 0 * x, c[1] * y, c[1] * z, c[1] * x]
    degree_2 = [c[2] * x * y, c[2] * y * z, c[3] * (2 * zz - xx - yy), c[2] * x * z, c[2] / 2 * (xx - yy)]
    degree_3 = [
        c[4] * y * (3 * xx - yy),
        c[5] * x * y * z,
        c[6] * y * (4 * zz - xx - yy),
        c[7] * z * (2 * zz - 3 * xx - 3 * yy),
        c[6] * x * (4 * zz - xx - yy),
        c[5] / 2 * z * (xx - yy),
        c[4] * x * (xx - 3 * yy),
    ]
    return torch.stack(degrees_0_1 + degree_2 + degree_3, dim=-1)


SWEEP = [{"N": 2000000}, {"N": 300007}]
SWEEP_CPU = [{"N": 203}, {"N": 128}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], 3, device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def harmonics_backward_kernel(x_ptr, dout_ptr, dx_ptr, N, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    a, x, y, z = direction(x_ptr, n, N, eps)
    xx, yy, zz = x * x, y * y, z * z
    at = dout_ptr + 16 * n  # the first dY has nowhere to go: Y_0 is a constant
    dy = C1 * tl.load(at + 1, mask=mask, other=0.0)
    dz = C1 * tl.load(at + 2, mask=mask, other=0.0)
    dx = C1 * tl.load(at + 3, mask=mask, other=0.0)
    g = C2 * tl.load(at + 4, mask=mask, other=0.0)  # x y
    dx, dy = dx + g * y, dy + g * x
    g = C2 * tl.load(at + 5, mask=mask, other=0.0)  # y z
    dy, dz = dy + g * z, dz + g * y
    g = 2 * C20 * tl.load(at + 6, mask=mask, other=0.0)  # 2 z^2 - x^2 - y^2
    dx, dy, dz = dx - g * x, dy - g * y, dz + 2 * g * z
    g = C2 * tl.load(at + 7, mask=mask, other=0.0)  # x z
    dx, dz = dx + g * z, dz + g * x
    g = C2 * tl.load(at + 8, mask=mask, other=0.0)  # (x^2 - y^2) / 2
    dx, dy = dx + g * x, dy - g * y
    g = 3 * C33 * tl.load(at + 9, mask=mask, other=0.0)  # 3 x^2 y - y^3
    dx, dy = dx + 2 * g * x * y, dy + g * (xx - yy)
    g = C32 * tl.load(at + 10, mask=mask, other=0.0)  # x y z
    dx, dy, dz = dx + g * y * z, dy + g * x * z, dz + g * x * y
    g = C31 * tl.load(at + 11, mask=mask, other=0.0)  # y (4 z^2 - x^2 - y^2)
    dx, dy, dz = dx - 2 * g * x * y, dy + g * (4 * zz - xx - 3 * yy), dz + 8 * g * y * z
    g = 3 * C30 * tl.load(at + 12, mask=mask, other=0.0)  # 2 z^3 - 3 z (x^2 + y^2)
    dx, dy, dz = dx - 2 * g * x * z, dy - 2 * g * y * z, dz + g * (2 * zz - xx - yy)
    g = C31 * tl.load(at + 13, mask=mask, other=0.0)  # x (4 z^2 - x^2 - y^2)
    dx, dy, dz = dx + g * (4 * zz - 3 * xx - yy), dy - 2 * g * x * y, dz + 8 * g * x * z
    g = C32 * tl.load(at + 14, mask=mask, other=0.0)  # z (x^2 - y^2) / 2
    dx, dy, dz = dx + g * x * z, dy - g * y * z, dz + g * (xx - yy) / 2
    g = 3 * C33 * tl.load(at + 15, mask=mask, other=0.0)  # x^3 - 3 x y^2
    dx, dy = dx + g * (xx - yy), dy - 2 * g * x * y
    along = x * dx + y * dy + z * dz
    tl.store(dx_ptr + 3 * n, a * (dx - x * along), mask=mask)
    tl.store(dx_ptr + 3 * n + 1, a * (dy - y * along), mask=mask)
    tl.store(dx_ptr + 3 * n + 2, a * (dz - z * along), mask=mask)


class SphericalHarmonics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.eps = eps
        return spherical_harmonics(x, eps)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        N = x.shape[0]
        dx = torch.empty_like(x)
        harmonics_backward_kernel[(triton.cdiv(N, 128),)](x, dout.contiguous(), dx, N, ctx.eps, BLOCK=128)
        return dx, None


def spherical_harmonics_autograd(x, eps=1e-12):
    return SphericalHarmonics.apply(x, eps)
