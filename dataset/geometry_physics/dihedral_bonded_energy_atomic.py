"""Torsion energy of a molecule: a cosine of the angle between two planes that share a bond.

Forward    for atoms i, j, k, l:  b_1 = x_j - x_i,  b_2 = x_k - x_j,  b_3 = x_l - x_k,  r = |b_2|,
           m = b_1 x b_2,  n = b_2 x b_3;   phi is the angle of (X, Y) = (<m, n>, r <b_1, n>);
           E = K (1 + cos(f phi - delta)),  f a whole number from 1 to 6
Backward   D = -K f sin(f phi - delta) = dE/dphi. An end atom that turns about the bond moves along its
           plane's normal:  dphi/dx_i = -(r / |m|^2) m,   dphi/dx_l = (r / |n|^2) n;   the inner two share
           h = (<b_1, b_2> / |m|^2) m / r + (<b_2, b_3> / |n|^2) n / r:
           dphi/dx_j = -dphi/dx_i + h,   dphi/dx_k = -dphi/dx_l - h,  the four sum to 0;
           dK = 1 + cos(f phi - delta),  ddelta = K sin(f phi - delta)

Forward schedule: a lane owns a torsion and gathers its atoms. No angle is computed: the cosine and sine of
f phi are the f-th power of the complex number (X + iY) / |X + iY|, five products at most. Where three atoms
are nearly in a line a normal is a difference of nearly equal products, so these are taken with their
rounding.
Backward schedule: the lane keeps its torsion, and makes the four forces from what the forward had, without a
division by sin phi, where a derivative through arccos has one. An atom is in up to some ten torsions and
lists are as they are in the topology, so the forces are added by atomics: 12 a torsion, on addresses that few
share. dK and ddelta belong to the torsion and are stored.

op: torsion_energy
schedule: atomic_accumulate, same_tile_pointwise
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
def load_atom(x_ptr, atoms_ptr, t, place: tl.constexpr, N):
    atom = tl.load(atoms_ptr + 4 * t + place, mask=t < N, other=0).to(tl.int64)
    x = tl.load(x_ptr + 3 * atom, mask=t < N, other=0.0)
    y = tl.load(x_ptr + 3 * atom + 1, mask=t < N, other=0.0)
    return atom, x, y, tl.load(x_ptr + 3 * atom + 2, mask=t < N, other=0.0)


@triton.jit
def dot(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def minor(a, b, c, d):
    """a d - b c, with what rounding took of b c: no digit is lost where both are nearly equal."""
    product = b * c
    return tl.fma(a, d, -product) + tl.fma(-b, c, product)


@triton.jit
def cross(ax, ay, az, bx, by, bz):
    return minor(ay, az, by, bz), minor(az, ax, bz, bx), minor(ax, ay, bx, by)


@triton.jit
def angle(f_ptr, delta_ptr, t, X, Y, N):
    """Cosine and sine of f phi - delta, and f."""
    f = tl.load(f_ptr + t, mask=t < N, other=0)
    delta = tl.load(delta_ptr + t, mask=t < N, other=0.0)
    h = tl.rsqrt(tl.where(t < N, X * X + Y * Y, 1.0))
    c, s = X * h, Y * h
    re, im = tl.cos(delta), -tl.sin(delta)
    for power in tl.static_range(6):
        more = power < f
        re, im = tl.where(more, re * c - im * s, re), tl.where(more, re * s + im * c, im)
    return re, im, f


@triton.jit
def torsion_kernel(x_ptr, atoms_ptr, K_ptr, f_ptr, delta_ptr, out_ptr, N, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, ix, iy, iz = load_atom(x_ptr, atoms_ptr, t, 0, N)
    _, jx, jy, jz = load_atom(x_ptr, atoms_ptr, t, 1, N)
    _, kx, ky, kz = load_atom(x_ptr, atoms_ptr, t, 2, N)
    _, lx, ly, lz = load_atom(x_ptr, atoms_ptr, t, 3, N)
    bx, by, bz = kx - jx, ky - jy, kz - jz
    mx, my, mz = cross(jx - ix, jy - iy, jz - iz, bx, by, bz)
    nx, ny, nz = cross(bx, by, bz, lx - kx, ly - ky, lz - kz)
    Y = tl.sqrt(dot(bx, by, bz, bx, by, bz)) * dot(jx - ix, jy - iy, jz - iz, nx, ny, nz)
    c, _, _ = angle(f_ptr, delta_ptr, t, dot(mx, my, mz, nx, ny, nz), Y, N)
    tl.store(out_ptr + t, tl.load(K_ptr + t, mask=t < N, other=0.0) * (1 + c), mask=t < N)


@autodiff(inputs_require_grad=(0, 2, 4))
def torsion_energy(x, atoms, K, f, delta):
    """x: float32 (atoms, 3); atoms: int64 (N, 4); K, delta: float32 (N); f: int32 (N), from 1 to 6."""
    N = atoms.shape[0]
    if not K.shape == f.shape == delta.shape == (N,) or atoms.shape[1:] != (4,):
        raise ValueError(f"{N} torsions: {tuple(K.shape)}, {tuple(f.shape)}, {tuple(delta.shape)}")
    inputs = [tensor.contiguous() for tensor in (x, atoms, K, f, delta)]
    out = torch.empty(N, device=x.device, dtype=x.dtype)
    torsion_kernel[(triton.cdiv(N, BLOCK),)](*inputs, out, N, BLOCK=BLOCK)
    return out


def reference(x, atoms, K, f, delta):
    i, j, k, last = x[atoms].unbind(1)
    b2 = k - j
    m, n = torch.linalg.cross(j - i, b2), torch.linalg.cross(b2, last - k)
    phi = torch.atan2(b2.norm(dim=1) * ((j - i) * n).sum(1), (m * n).sum(1))
    return K * (1 + torch.cos(f * phi - delta))


SWEEP = [{"atoms": 100000, "N": 300000}, {"atoms": 5003, "N": 20011}]
SWEEP_CPU = [{"atoms": 25, "N": 33}, {"atoms": 60, "N": 90}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """A chain that turns by chance, but as bonds do: lines of two neighbouring ones are 36 degrees apart or
    more, as three atoms in a line have no torsion. A torsion is of four neighbours in the chain."""
    count, N = max(4, dims["atoms"]), dims["N"]
    steps = torch.rand(count, 3, device=device, dtype=dtype) - 0.5
    steps[::2, 0] += 1.5
    steps[1::2, 1] += 1.5
    steps *= torch.randint(0, 2, (count, 1), device=device) * 2 - 1
    x = (steps / steps.norm(dim=1, keepdim=True)).cumsum(0)
    first = torch.randint(0, count - 3, (N, 1), device=device)
    K, delta = torch.rand(N, device=device, dtype=dtype), 3 * torch.rand(N, device=device, dtype=dtype)
    f = torch.randint(1, 7, (N,), device=device, dtype=torch.int32)
    return x, first + torch.arange(4, device=device), K, f, delta


# ---- backward ----


@triton.jit
def add_force(dx_ptr, atom, mask, x, y, z):
    tl.atomic_add(dx_ptr + 3 * atom, x, mask=mask, sem="relaxed")
    tl.atomic_add(dx_ptr + 3 * atom + 1, y, mask=mask, sem="relaxed")
    tl.atomic_add(dx_ptr + 3 * atom + 2, z, mask=mask, sem="relaxed")


@triton.jit
def torsion_backward_kernel(
    x_ptr, atoms_ptr, K_ptr, f_ptr, delta_ptr, dE_ptr, dx_ptr, dK_ptr, ddelta_ptr, N,
    WANT_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, ix, iy, iz = load_atom(x_ptr, atoms_ptr, t, 0, N)
    j, jx, jy, jz = load_atom(x_ptr, atoms_ptr, t, 1, N)
    k, kx, ky, kz = load_atom(x_ptr, atoms_ptr, t, 2, N)
    last, lx, ly, lz = load_atom(x_ptr, atoms_ptr, t, 3, N)
    ax, ay, az = jx - ix, jy - iy, jz - iz
    bx, by, bz = kx - jx, ky - jy, kz - jz
    cx, cy, cz = lx - kx, ly - ky, lz - kz
    mx, my, mz = cross(ax, ay, az, bx, by, bz)
    nx, ny, nz = cross(bx, by, bz, cx, cy, cz)
    r = tl.sqrt(dot(bx, by, bz, bx, by, bz))
    Y = r * dot(ax, ay, az, nx, ny, nz)
    cosine, sine, f = angle(f_ptr, delta_ptr, t, dot(mx, my, mz, nx, ny, nz), Y, N)
    dE = tl.load(dE_ptr + t, mask=t < N, other=0.0)
    K = tl.load(K_ptr + t, mask=t < N, other=0.0)
    tl.store(dK_ptr + t, dE * (1 + cosine), mask=t < N)
    tl.store(ddelta_ptr + t, dE * K * sine, mask=t < N)
    if WANT_X:
        D = -dE * K * f * sine
        m2 = D / tl.where(t < N, dot(mx, my, mz, mx, my, mz), 1.0)
        n2 = D / tl.where(t < N, dot(nx, ny, nz, nx, ny, nz), 1.0)
        over_r = 1 / tl.where(t < N, r, 1.0)
        hm = dot(ax, ay, az, bx, by, bz) * over_r * m2
        hn = dot(bx, by, bz, cx, cy, cz) * over_r * n2
        hx, hy, hz = hm * mx + hn * nx, hm * my + hn * ny, hm * mz + hn * nz
        m2, n2 = r * m2, r * n2
        add_force(dx_ptr, i, t < N, -m2 * mx, -m2 * my, -m2 * mz)
        add_force(dx_ptr, j, t < N, m2 * mx + hx, m2 * my + hy, m2 * mz + hz)
        add_force(dx_ptr, k, t < N, -n2 * nx - hx, -n2 * ny - hy, -n2 * nz - hz)
        add_force(dx_ptr, last, t < N, n2 * nx, n2 * ny, n2 * nz)


class TorsionEnergy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, atoms, K, f, delta):
        inputs = [tensor.contiguous() for tensor in (x, atoms, K, f, delta)]
        ctx.save_for_backward(*inputs)
        return torsion_energy(*inputs)

    @staticmethod
    def backward(ctx, dE):
        x, atoms, K, f, delta = ctx.saved_tensors
        N, needs = atoms.shape[0], ctx.needs_input_grad
        dx = torch.zeros_like(x) if needs[0] else None
        dK, ddelta = torch.empty_like(K), torch.empty_like(delta)
        torsion_backward_kernel[(triton.cdiv(N, BLOCK),)](
            x, atoms, K, f, delta, dE.contiguous(), dx, dK, ddelta, N, WANT_X=needs[0], BLOCK=BLOCK
        )
        return dx, None, dK if needs[2] else None, None, ddelta if needs[4] else None


def torsion_energy_autograd(x, atoms, K, f, delta):
    return TorsionEnergy.apply(x, atoms, K, f, delta)
