"""Soft-core Lennard-Jones energy of each atom in periodic boxes, with learned depth and size.

Forward    d_ij = x_i - x_j, each coordinate less the nearest multiple of the box;  z = |d_ij|^2 / s^2,
           u = 1 / (alpha + z^3),  f(z) = 4 (u^2 - u);
           E_i = e / 2 sum of f(z_ij) over the j != i with |d_ij| < cutoff
Backward   du/dz = -3 z^2 u^2, so f'(z) = -12 z^2 u^2 (2 u - 1). A pair is in E_i and in E_j:
           with h_ij = (dE_i + dE_j) / 2,  dx_i = e (2 / s^2) sum_j h_ij f'(z_ij) d_ij;
           de = sum_i dE_i / 2 sum_j f(z_ij),   and with dz/ds = -2 z / s
           ds = -(e / s) sum_i dE_i sum_j z_ij f'(z_ij)

Forward schedule: a program owns a tile of a box's atoms and walks all of them, a tile of pairs a step.
Every pair is visited from both sides: twice the arithmetic, and neither atomics nor a grid of pairs.
Backward schedule: the force on i wants every j, and as d_ij = -d_ji the pair's other side wants the same
number with the other sign: that side makes it itself. So atoms keep their owner, who adds dE_j to its own
dE_i and thereby takes both roles of the pair at once. The two scalars belong to no atom: each program
stores its share in a slot, from the same walk, and one program adds the slots.

op: pair_potential
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_atoms(x_ptr, i, N):
    x = tl.load(x_ptr + 3 * i, mask=i < N, other=0.0)
    y = tl.load(x_ptr + 3 * i + 1, mask=i < N, other=0.0)
    return x, y, tl.load(x_ptr + 3 * i + 2, mask=i < N, other=0.0)


@triton.jit
def nearest_image(a, b, box):
    d = a[:, None] - b[None, :]
    return d - box * tl.floor(d / box + 0.5)


@triton.jit
def pairs(x, y, z, x_ptr, i, j, N, box, cutoff):
    """Which of a tile of pairs count, their differences and squared lengths; zeros for the others."""
    xj, yj, zj = load_atoms(x_ptr, j, N)
    dx, dy, dz = nearest_image(x, xj, box), nearest_image(y, yj, box), nearest_image(z, zj, box)
    r2 = dx * dx + dy * dy + dz * dz
    counts = (r2 < cutoff * cutoff) & (i[:, None] != j[None, :]) & (j[None, :] < N) & (i[:, None] < N)
    dx, dy, dz = tl.where(counts, dx, 0.0), tl.where(counts, dy, 0.0), tl.where(counts, dz, 0.0)
    return counts, dx, dy, dz, tl.where(counts, r2, 0.0)


@triton.jit
def energy_kernel(
    x_ptr, e_ptr, s_ptr, out_ptr, N, box, cutoff, alpha, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr
):
    atoms = tl.program_id(1).to(tl.int64) * N
    x_ptr += 3 * atoms
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    x, y, z = load_atoms(x_ptr, i, N)
    s = tl.load(s_ptr)
    total = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        counts, _, _, _, r2 = pairs(x, y, z, x_ptr, i, j, N, box, cutoff)
        q = r2 / (s * s)
        u = 1 / (alpha + q * q * q)
        total += tl.sum(tl.where(counts, 4 * (u * u - u), 0.0), axis=1)
    tl.store(out_ptr + atoms + i, 0.5 * tl.load(e_ptr) * total, mask=i < N)


BLOCKS = {"BLOCK_I": 16, "BLOCK": 64}


@autodiff(inputs_require_grad=(0, 1, 2))
def pair_energy(x, e, s, box=8.0, cutoff=2.5, alpha=0.5):
    """x: float32 (B, N, 3); e, s: float32 (1); gives (B, N): each atom has half of its pairs' energies."""
    x, (B, N, _) = x.contiguous(), x.shape
    out = torch.empty((B, N), device=x.device, dtype=x.dtype)
    energy_kernel[(triton.cdiv(N, BLOCKS["BLOCK_I"]), B)](x, e, s, out, N, box, cutoff, alpha, **BLOCKS)
    return out


def reference(x, e, s, box=8.0, cutoff=2.5, alpha=0.5):
    d = x[:, :, None] - x[:, None]
    d = d - box * (d / box + 0.5).detach().floor()
    r2 = d.pow(2).sum(-1)
    counts = (r2 < cutoff**2) & ~torch.eye(x.shape[1], device=x.device, dtype=torch.bool)
    u = 1 / (alpha + (r2 / s**2) ** 3)
    return 0.5 * e * torch.where(counts, 4 * (u * u - u), 0.0).sum(2)


SWEEP = [{"B": 8, "N": 2048}, {"B": 3, "N": 1501}]
SWEEP_CPU = [{"B": 2, "N": 23}, {"B": 1, "N": 66}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """About one atom a unit of volume."""
    B, N = dims["B"], dims["N"]
    box = max(6.0, round(N ** (1 / 3), 2))
    x = box * torch.rand(B, N, 3, device=device, dtype=dtype)
    e, s = (torch.full((1,), value, device=device, dtype=dtype) for value in (0.8, 0.9))
    return (x, e, s), {"box": box}


# ---- backward ----


@triton.jit
def energy_backward_kernel(
    x_ptr, e_ptr, s_ptr, de_ptr, dx_ptr, slots_ptr, N, box, cutoff, alpha,
    BLOCK_I: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atoms = tl.program_id(1).to(tl.int64) * N
    x_ptr += 3 * atoms
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    x, y, z = load_atoms(x_ptr, i, N)
    e, s = tl.load(e_ptr), tl.load(s_ptr)
    own = tl.load(de_ptr + atoms + i, mask=i < N, other=0.0)
    fx = tl.zeros([BLOCK_I], dtype=tl.float32)
    fy = tl.zeros([BLOCK_I], dtype=tl.float32)
    fz = tl.zeros([BLOCK_I], dtype=tl.float32)
    energy = tl.zeros([BLOCK_I], dtype=tl.float32)
    virial = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        counts, dx, dy, dz, r2 = pairs(x, y, z, x_ptr, i, j, N, box, cutoff)
        other = tl.load(de_ptr + atoms + j, mask=j < N, other=0.0)
        q = r2 / (s * s)
        u = 1 / (alpha + q * q * q)
        slope = -12 * q * q * u * u * (2 * u - 1)  # 0 for those that do not count, as q is
        energy += tl.sum(tl.where(counts, 4 * (u * u - u), 0.0), axis=1)
        virial += tl.sum(slope * q, axis=1)
        h = (own[:, None] + other[None, :]) * slope
        fx += tl.sum(h * dx, axis=1)
        fy += tl.sum(h * dy, axis=1)
        fz += tl.sum(h * dz, axis=1)
    scale = e / (s * s)
    tl.store(dx_ptr + 3 * (atoms + i), scale * fx, mask=i < N)
    tl.store(dx_ptr + 3 * (atoms + i) + 1, scale * fy, mask=i < N)
    tl.store(dx_ptr + 3 * (atoms + i) + 2, scale * fz, mask=i < N)
    slot = slots_ptr + 2 * (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    tl.store(slot, 0.5 * tl.sum(own * energy, axis=0))
    tl.store(slot + 1, -e / s * tl.sum(own * virial, axis=0))


@triton.jit
def scalars_kernel(slots_ptr, de_ptr, ds_ptr, count, BLOCK: tl.constexpr):
    de = tl.zeros([BLOCK], dtype=tl.float32)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        de += tl.load(slots_ptr + 2 * i, mask=i < count, other=0.0)
        ds += tl.load(slots_ptr + 2 * i + 1, mask=i < count, other=0.0)
    tl.store(de_ptr, tl.sum(de, axis=0))
    tl.store(ds_ptr, tl.sum(ds, axis=0))


class PairEnergy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, e, s, box, cutoff, alpha):
        x = x.contiguous()
        ctx.save_for_backward(x, e, s)
        ctx.constants = box, cutoff, alpha
        return pair_energy(x, e, s, box, cutoff, alpha)

    @staticmethod
    def backward(ctx, dout):
        x, e, s = ctx.saved_tensors
        (B, N, _), needs = x.shape, ctx.needs_input_grad
        tiles = triton.cdiv(N, BLOCKS["BLOCK_I"])
        dx, de, ds = torch.empty_like(x), torch.empty_like(e), torch.empty_like(s)
        slots = torch.empty((B * tiles, 2), device=x.device, dtype=torch.float32)
        energy_backward_kernel[(tiles, B)](x, e, s, dout.contiguous(), dx, slots, N, *ctx.constants, **BLOCKS)
        if needs[1] or needs[2]:
            scalars_kernel[(1,)](slots, de, ds, B * tiles, BLOCK=128)
        return dx if needs[0] else None, de if needs[1] else None, ds if needs[2] else None, None, None, None


def pair_energy_autograd(x, e, s, box=8.0, cutoff=2.5, alpha=0.5):
    return PairEnergy.apply(x, e, s, box, cutoff, alpha)
