"""From a gaussian's quaternion and scales to its footprint on the screen: the setup of splatting.

Forward    R the rotation of q = Q / |Q|,  s = exp(l),  M = R diag(s): its covariance is M M^T.
           J (2, 3) the projection's derivative at the gaussian, given:  N = J M (2, 3),  S = N N^T + blur I;
           out = the conic (S^-1)_00, (S^-1)_01, (S^-1)_11
Backward   dC the symmetric matrix of the conic's gradients (half of the middle one on each side).
           With P = J R,  D = diag(exp 2l):  S = P D P^T + blur I,  Y = S^-1 P,  H = -2 Y^T dC Y (3, 3):
           dJ = -2 S^-1 dC Y D R^T,   dl_k = D_k H_kk;   a turn about the gaussian's own axis 0 mixes axes 1
           and 2:  t_0 = H_12 (D_1 - D_2), and so on in turn, nothing where two scales are equal;
           dQ = 2 / |Q| q (0, t), a product of quaternions, orthogonal to q

Forward schedule: a lane owns a gaussian; the 3 x 3 covariance is never made, only N, two rows of it.
Backward schedule: the same lane makes R and P again; nothing but the inputs is saved. A gaussian that is seen
from its edge has one large and one small eigenvalue in S, and S^-1 times a column of P, taken by the entries
of S^-1, is a difference of nearly equal numbers, as is what comes back through R's entries and is then made
orthogonal to q. So Y comes of c = u x v, the cross product of P's rows, made from that of J's:
det S = D_1 D_2 c_0^2 + D_2 D_0 c_1^2 + D_0 D_1 c_2^2 + blur (<u, D u> + <v, D v> + blur),
y_u = (blur u + D v x c) / det,   y_v = (blur v + c x D u) / det.
The gradients of R's nine entries are never made. 13 numbers in, 13 out, all of them local.

op: gaussian_conic
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def load_three(ptr, n, N, WIDTH: tl.constexpr):
    x = tl.load(ptr + WIDTH * n, mask=n < N, other=0.0)
    y = tl.load(ptr + WIDTH * n + 1, mask=n < N, other=0.0)
    return x, y, tl.load(ptr + WIDTH * n + 2, mask=n < N, other=0.0)


@triton.jit
def store_three(ptr, n, N, x, y, z, WIDTH: tl.constexpr):
    tl.store(ptr + WIDTH * n, x, mask=n < N)
    tl.store(ptr + WIDTH * n + 1, y, mask=n < N)
    tl.store(ptr + WIDTH * n + 2, z, mask=n < N)


@triton.jit
def dot(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def rotation(q_ptr, n, N):
    """1 / |Q|, q, and R by rows."""
    w, x, y = load_three(q_ptr, n, N, 4)
    z = tl.load(q_ptr + 4 * n + 3, mask=n < N, other=0.0)
    a = tl.rsqrt(tl.where(n < N, w * w + x * x + y * y + z * z, 1.0))
    w, x, y, z = a * w, a * x, a * y, a * z
    r0, r1, r2 = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    r3, r4, r5 = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    r6, r7, r8 = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)
    return a, w, x, y, z, r0, r1, r2, r3, r4, r5, r6, r7, r8


@triton.jit
def conic_kernel(q_ptr, l_ptr, j_ptr, out_ptr, N, blur, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, _, _, r0, r1, r2, r3, r4, r5, r6, r7, r8 = rotation(q_ptr, n, N)
    l0, l1, l2 = load_three(l_ptr, n, N, 3)
    s0, s1, s2 = tl.exp(l0), tl.exp(l1), tl.exp(l2)
    jx, jy, jz = load_three(j_ptr, n, N, 6)
    kx, ky, kz = load_three(j_ptr + 3, n, N, 6)
    u0, u1, u2 = (
        s0 * dot(jx, jy, jz, r0, r3, r6),
        s1 * dot(jx, jy, jz, r1, r4, r7),
        s2 * dot(jx, jy, jz, r2, r5, r8),
    )
    v0, v1, v2 = (
        s0 * dot(kx, ky, kz, r0, r3, r6),
        s1 * dot(kx, ky, kz, r1, r4, r7),
        s2 * dot(kx, ky, kz, r2, r5, r8),
    )
    a, b = dot(u0, u1, u2, u0, u1, u2) + blur, dot(u0, u1, u2, v0, v1, v2)
    c = dot(v0, v1, v2, v0, v1, v2) + blur
    over = 1 / (a * c - b * b)
    store_three(out_ptr, n, N, c * over, -b * over, a * over, 3)


@autodiff(inputs_require_grad=(0, 1, 2))
def gaussian_conic(q, scales, j, blur=0.3):
    """q: float32 (N, 4), the real part first, none zero; scales: (N, 3), logarithms; j: (N, 2, 3); gives
    (N, 3)."""
    N = q.shape[0]
    if q.shape != (N, 4) or scales.shape != (N, 3) or j.shape != (N, 2, 3):
        raise ValueError(f"q {tuple(q.shape)}, scales {tuple(scales.shape)} and j {tuple(j.shape)}")
    out = torch.empty((N, 3), device=q.device, dtype=q.dtype)
    conic_kernel[(triton.cdiv(N, BLOCK),)](
        q.contiguous(), scales.contiguous(), j.contiguous(), out, N, blur, BLOCK=BLOCK
    )
    return out


def reference(q, scales, j, blur=0.3):
    w, x, y, z = (q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True))).unbind(-1)
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], dim=-1),
        torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], dim=-1),
        torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], dim=-1),
    ]
    n = j @ (torch.stack(rows, dim=1) * scales.exp()[:, None])
    s = n @ n.transpose(1, 2)
    a, b, c = s[:, 0, 0] + blur, s[:, 0, 1], s[:, 1, 1] + blur
    return torch.stack([c, -b, a], dim=1) / (a * c - b * b)[:, None]


SWEEP = [{"N": 2000000}, {"N": 300007}]
SWEEP_CPU = [{"N": 101}, {"N": 200}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Footprints of about a pixel."""
    N = dims["N"]
    q, scales = (torch.randn(N, width, device=device, dtype=dtype) for width in (4, 3))
    return q, 0.3 * scales, torch.randn(N, 2, 3, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def into_axes(x, y, z, r0, r1, r2, r3, r4, r5, r6, r7, r8):
    """A row times R; times R^T, if that is what is given."""
    return dot(x, y, z, r0, r3, r6), dot(x, y, z, r1, r4, r7), dot(x, y, z, r2, r5, r8)


@triton.jit
def conic_backward_kernel(
    q_ptr, l_ptr, j_ptr, dout_ptr, dq_ptr, dl_ptr, dj_ptr, N, blur, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, w, x, y, z, r0, r1, r2, r3, r4, r5, r6, r7, r8 = rotation(q_ptr, n, N)
    l0, l1, l2 = load_three(l_ptr, n, N, 3)
    D0, D1, D2 = tl.exp(2 * l0), tl.exp(2 * l1), tl.exp(2 * l2)
    jx, jy, jz = load_three(j_ptr, n, N, 6)
    kx, ky, kz = load_three(j_ptr + 3, n, N, 6)
    u0, u1, u2 = into_axes(jx, jy, jz, r0, r1, r2, r3, r4, r5, r6, r7, r8)
    v0, v1, v2 = into_axes(kx, ky, kz, r0, r1, r2, r3, r4, r5, r6, r7, r8)
    cx, cy, cz = cross(jx, jy, jz, kx, ky, kz)
    c0, c1, c2 = into_axes(cx, cy, cz, r0, r1, r2, r3, r4, r5, r6, r7, r8)
    Du0, Du1, Du2, Dv0, Dv1, Dv2 = D0 * u0, D1 * u1, D2 * u2, D0 * v0, D1 * v1, D2 * v2
    uu, uv = dot(u0, u1, u2, Du0, Du1, Du2), dot(u0, u1, u2, Dv0, Dv1, Dv2)
    vv = dot(v0, v1, v2, Dv0, Dv1, Dv2)
    over = 1 / (dot(D1 * D2, D2 * D0, D0 * D1, c0 * c0, c1 * c1, c2 * c2) + blur * (uu + vv + blur))
    # Y by rows, y of u and z of v; then f and g, those of -2 dC Y, with p, h, t the symmetric -2 dC
    y0, y1, y2 = cross(Dv0, Dv1, Dv2, c0, c1, c2)
    z0, z1, z2 = cross(c0, c1, c2, Du0, Du1, Du2)
    y0, y1, y2 = over * (blur * u0 + y0), over * (blur * u1 + y1), over * (blur * u2 + y2)
    z0, z1, z2 = over * (blur * v0 + z0), over * (blur * v1 + z1), over * (blur * v2 + z2)
    p, h, t = load_three(dout_ptr, n, N, 3)
    p, h, t = -2 * p, -h, -2 * t
    f0, f1, f2 = p * y0 + h * z0, p * y1 + h * z1, p * y2 + h * z2
    g0, g1, g2 = h * y0 + t * z0, h * y1 + t * z1, h * y2 + t * z2
    store_three(dl_ptr, n, N, D0 * (y0 * f0 + z0 * g0), D1 * (y1 * f1 + z1 * g1), D2 * (y2 * f2 + z2 * g2), 3)
    t0, t1, t2 = (
        (y1 * f2 + z1 * g2) * (D1 - D2),
        (y2 * f0 + z2 * g0) * (D2 - D0),
        (y0 * f1 + z0 * g1) * (D0 - D1),
    )
    dx, dy, dz = cross(x, y, z, t0, t1, t2)
    a *= 2
    store_three(dq_ptr, n, N, -a * dot(x, y, z, t0, t1, t2), a * (w * t0 + dx), a * (w * t1 + dy), 4)
    tl.store(dq_ptr + 4 * n + 3, a * (w * t2 + dz), mask=n < N)
    # -2 S^-1 dC Y D by rows, e, h, g of S^-1
    e, h, g = (vv + blur) * over, -uv * over, (uu + blur) * over
    u0, u1, u2 = D0 * (e * f0 + h * g0), D1 * (e * f1 + h * g1), D2 * (e * f2 + h * g2)
    v0, v1, v2 = D0 * (h * f0 + g * g0), D1 * (h * f1 + g * g1), D2 * (h * f2 + g * g2)
    jx, jy, jz = into_axes(u0, u1, u2, r0, r3, r6, r1, r4, r7, r2, r5, r8)
    kx, ky, kz = into_axes(v0, v1, v2, r0, r3, r6, r1, r4, r7, r2, r5, r8)
    store_three(dj_ptr, n, N, jx, jy, jz, 6)
    store_three(dj_ptr + 3, n, N, kx, ky, kz, 6)


class GaussianConic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, scales, j, blur):
        q, scales, j = q.contiguous(), scales.contiguous(), j.contiguous()
        ctx.save_for_backward(q, scales, j)
        ctx.blur = blur
        return gaussian_conic(q, scales, j, blur)

    @staticmethod
    def backward(ctx, dout):
        q, scales, j = ctx.saved_tensors
        N, needs = q.shape[0], ctx.needs_input_grad
        grads = torch.empty_like(q), torch.empty_like(scales), torch.empty_like(j)
        conic_backward_kernel[(triton.cdiv(N, BLOCK),)](
            q, scales, j, dout.contiguous(), *grads, N, ctx.blur, BLOCK=BLOCK
        )
        wanted = zip(grads, needs, strict=False)
        return *(grad if want else None for grad, want in wanted), None


def gaussian_conic_autograd(q, scales, j, blur=0.3):
    return GaussianConic.apply(q, scales, j, blur)
