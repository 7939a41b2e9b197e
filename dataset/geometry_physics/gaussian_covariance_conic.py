"""From a gaussian's quaternion and scales to its footprint on the screen: the setup of splatting.

Forward    R the rotation of q = Q (|Q|^2 + eps)^(-1/2),  s = exp(l),  M = R diag(s): its covariance is M M^T.
           J (2, 3) the projection's derivative at the gaussian, given:  N = J M (2, 3),  S = N N^T + blur I;
           out = the conic (S^-1)_00, (S^-1)_01, (S^-1)_11
Backward   dC the symmetric matrix of the conic's gradients (half of the middle one on each side):
           dS = -S^-1 dC S^-1,   dN = 2 dS N,   dJ = dN M^T,   dM = J^T dN;
           dR_ak = dM_ak s_k,  dl_k = sum_a R_ak dR_ak;  then dq from R's entries, which are quadratic in q,
           and dQ = (dq - q <q, dq>) (|Q|^2 + eps)^(-1/2)

Forward schedule: a lane owns a gaussian; the 3 x 3 covariance is never made, only N, two rows of it.
Backward schedule: the same lane makes R, M and N again and walks the chain in reverse: what is saved is the
conic, which the inverse needs and which the next stage keeps anyway: dS = -C dC C without a division, where
going back through the determinant would divide by its square. 13 numbers in, 13 out, all of them local.

op: gaussian_conic
schedule: same_tile_pointwise, adjoint_solve
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
def rotation(q_ptr, n, N, eps):
    """1 / |Q|, q, and R by rows."""
    w, x, y = load_three(q_ptr, n, N, 4)
    z = tl.load(q_ptr + 4 * n + 3, mask=n < N, other=0.0)
    a = tl.rsqrt(w * w + x * x + y * y + z * z + eps)
    w, x, y, z = a * w, a * x, a * y, a * z
    r0, r1, r2 = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    r3, r4, r5 = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    r6, r7, r8 = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)
    return a, w, x, y, z, r0, r1, r2, r3, r4, r5, r6, r7, r8


@triton.jit
def conic_kernel(q_ptr, l_ptr, j_ptr, out_ptr, N, blur, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, _, _, r0, r1, r2, r3, r4, r5, r6, r7, r8 = rotation(q_ptr, n, N, eps)
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
def gaussian_conic(q, scales, j, blur=0.3, eps=1e-12):
    """q: float32 (N, 4), the real part first; scales: (N, 3), logarithms; j: (N, 2, 3); gives (N, 3)."""
    N = q.shape[0]
    if q.shape != (N, 4) or scales.shape != (N, 3) or j.shape != (N, 2, 3):
        raise ValueError(f"q {tuple(q.shape)}, scales {tuple(scales.shape)} and j {tuple(j.shape)}")
    out = torch.empty((N, 3), device=q.device, dtype=q.dtype)
    conic_kernel[(triton.cdiv(N, BLOCK),)](
        q.contiguous(), scales.contiguous(), j.contiguous(), out, N, blur, eps, BLOCK=BLOCK
    )
    return out


def reference(q, scales, j, blur=0.3, eps=1e-12):
    w, x, y, z = (q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + eps)).unbind(-1)
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
def conic_backward_kernel(
    q_ptr, l_ptr, j_ptr, out_ptr, dout_ptr, dq_ptr, dl_ptr, dj_ptr, N, eps, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, w, x, y, z, r0, r1, r2, r3, r4, r5, r6, r7, r8 = rotation(q_ptr, n, N, eps)
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
    # 2 dS = -2 C dC C, with e, f, g the conic C and p, h, t the symmetric dC
    e, f, g = load_three(out_ptr, n, N, 3)
    p, h, t = load_three(dout_ptr, n, N, 3)
    h = 0.5 * h
    pe, pf, te, tf = p * e + h * f, p * f + h * g, h * e + t * f, h * f + t * g
    da, db, dc = -2 * (e * pe + f * te), -2 * (e * pf + f * tf), -2 * (f * pf + g * tf)
    du0, du1, du2 = da * u0 + db * v0, da * u1 + db * v1, da * u2 + db * v2
    dv0, dv1, dv2 = db * u0 + dc * v0, db * u1 + dc * v1, db * u2 + dc * v2
    # dN^T R has the scales as a factor of each column on both ways
    du0, du1, du2, dv0, dv1, dv2 = s0 * du0, s1 * du1, s2 * du2, s0 * dv0, s1 * dv1, s2 * dv2
    jx2, jy2, jz2 = (
        dot(du0, du1, du2, r0, r1, r2),
        dot(du0, du1, du2, r3, r4, r5),
        dot(du0, du1, du2, r6, r7, r8),
    )
    store_three(dj_ptr, n, N, jx2, jy2, jz2, 6)
    kx2, ky2, kz2 = (
        dot(dv0, dv1, dv2, r0, r1, r2),
        dot(dv0, dv1, dv2, r3, r4, r5),
        dot(dv0, dv1, dv2, r6, r7, r8),
    )
    store_three(dj_ptr + 3, n, N, kx2, ky2, kz2, 6)
    # dR by rows
    g0, g1, g2 = jx * du0 + kx * dv0, jx * du1 + kx * dv1, jx * du2 + kx * dv2
    g3, g4, g5 = jy * du0 + ky * dv0, jy * du1 + ky * dv1, jy * du2 + ky * dv2
    g6, g7, g8 = jz * du0 + kz * dv0, jz * du1 + kz * dv1, jz * du2 + kz * dv2
    store_three(
        dl_ptr, n, N, dot(g0, g3, g6, r0, r3, r6), dot(g1, g4, g7, r1, r4, r7), dot(g2, g5, g8, r2, r5, r8), 3
    )
    dw = 2 * (x * (g7 - g5) + y * (g2 - g6) + z * (g3 - g1))
    dx = 2 * (w * (g7 - g5) + y * (g1 + g3) + z * (g2 + g6) - 2 * x * (g4 + g8))
    dy = 2 * (w * (g2 - g6) + x * (g1 + g3) + z * (g5 + g7) - 2 * y * (g0 + g8))
    dz = 2 * (w * (g3 - g1) + x * (g2 + g6) + y * (g5 + g7) - 2 * z * (g0 + g4))
    along = w * dw + x * dx + y * dy + z * dz
    store_three(dq_ptr, n, N, a * (dw - w * along), a * (dx - x * along), a * (dy - y * along), 4)
    tl.store(dq_ptr + 4 * n + 3, a * (dz - z * along), mask=n < N)


class GaussianConic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, scales, j, blur, eps):
        q, scales, j = q.contiguous(), scales.contiguous(), j.contiguous()
        out = gaussian_conic(q, scales, j, blur, eps)
        ctx.save_for_backward(q, scales, j, out)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, dout):
        q, scales, j, out = ctx.saved_tensors
        N, needs = q.shape[0], ctx.needs_input_grad
        grads = torch.empty_like(q), torch.empty_like(scales), torch.empty_like(j)
        conic_backward_kernel[(triton.cdiv(N, BLOCK),)](
            q, scales, j, out, dout.contiguous(), *grads, N, ctx.eps, BLOCK=BLOCK
        )
        wanted = zip(grads, needs, strict=False)
        return *(grad if want else None for grad, want in wanted), None, None


def gaussian_conic_autograd(q, scales, j, blur=0.3, eps=1e-12):
    return GaussianConic.apply(q, scales, j, blur, eps)
