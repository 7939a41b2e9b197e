"""Latent of a variational autoencoder: a reparameterised sample and its KL divergence, from one pass.

Forward    s = e^{v/2},  z = m + s n with n a standard normal number of (seed, position);
           K_i = sum_j (m^2 + e^v - 1 - v) / 2, one for each row
Backward   with dz and dK the two upstreams:  dm = dz + dK m,  dv = dz n s / 2 + dK (e^v - 1) / 2

Forward schedule: the owner of a row walks it in tiles, draws the noise, stores z, and adds the terms of K.
Backward schedule: pointwise, (row, column tile), as a row of K has one upstream for all of its terms. The
noise is drawn again from its position, so neither it nor z is saved: m, v and a seed are what the backward
needs, and m and v take their two gradients from both outputs in one pass, where two operations would add them
in memory. e^v - 1 and e^v - 1 - v come from series where v is small: a latent that carries nothing has v near
0, and its gradient there is a difference of ones.

op: vae_latent
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def noise(seed, offs):
    return tl.randn(seed, offs.to(tl.int32))


@triton.jit
def bend(v):
    """e^v - 1 - v."""
    small = tl.where((v < 0.5) & (v > -0.5), v, 0.0)
    series = 1.0 / 120 + small * (1.0 / 720 + small * (1.0 / 5040 + small / 40320))
    series = small * small * (1.0 / 2 + small * (1.0 / 6 + small * (1.0 / 24 + small * series)))
    return tl.where((v < 0.5) & (v > -0.5), series, tl.exp(v) - 1 - v)


@triton.jit
def rise(v):
    """e^v - 1; of v = -inf too, where the sum of bend(v) and v is no number."""
    return tl.where((v < 0.5) & (v > -0.5), bend(v) + v, tl.exp(v) - 1)


@triton.jit
def latent_kernel(m_ptr, v_ptr, z_ptr, kl_ptr, D, seed, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        j = start + tl.arange(0, BLOCK)
        offs = row * D + j
        m = tl.load(m_ptr + offs, mask=j < D, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs, mask=j < D, other=0.0).to(tl.float32)
        z = m + tl.exp(0.5 * v) * noise(seed, offs)
        tl.store(z_ptr + offs, z.to(z_ptr.dtype.element_ty), mask=j < D)
        total += 0.5 * (m * m + bend(v))
    tl.store(kl_ptr + row, tl.sum(total, axis=0))


@triton.jit
def export_noise_kernel(noise_ptr, n_elements, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise_ptr + offs, noise(seed, offs), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0, 1))
def vae_latent(m, v, seed):
    """m, v: (rows, D), mean and log-variance; seed: an integer; gives z, as m, and K, (rows) in float32."""
    if m.shape != v.shape or m.numel() >= 2**31:
        raise ValueError("m and v have one shape, of fewer than 2^31 positions for the generator")
    m, v, (rows, D) = m.contiguous(), v.contiguous(), m.shape
    z, kl = torch.empty_like(m), torch.empty(rows, device=m.device, dtype=torch.float32)
    BLOCK = min(1024, triton.next_power_of_2(D))
    latent_kernel[(rows,)](m, v, z, kl, D, seed, BLOCK=BLOCK)
    return z, kl


def reference(m, v, seed):
    n = torch.empty(m.shape, device=m.device, dtype=torch.float32)
    export_noise_kernel[(triton.cdiv(n.numel(), 512),)](n, n.numel(), seed, BLOCK=512)
    z = m + torch.exp(0.5 * v) * n
    return z, 0.5 * (m * m + torch.expm1(v) - v).sum(1)


SWEEP = [{"rows": 8192, "D": 4096}, {"rows": 65537, "D": 130}]
SWEEP_CPU = [{"rows": 13, "D": 50}, {"rows": 3, "D": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    m, v = (torch.randn(dims["rows"], dims["D"], device=device, dtype=dtype) for _ in range(2))
    return (m, v), {"seed": 31}


# ---- backward ----


@triton.jit
def latent_backward_kernel(
    m_ptr, v_ptr, dz_ptr, dkl_ptr, dm_ptr, dv_ptr, D, seed, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = row * D + j
    m = tl.load(m_ptr + offs, mask=j < D, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + offs, mask=j < D, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + offs, mask=j < D, other=0.0).to(tl.float32)
    dkl = tl.load(dkl_ptr + row)
    dm = dz + dkl * m
    dv = 0.5 * (dz * noise(seed, offs) * tl.exp(0.5 * v) + dkl * rise(v))
    tl.store(dm_ptr + offs, dm.to(dm_ptr.dtype.element_ty), mask=j < D)
    tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=j < D)


class VAELatent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m, v, seed):
        m, v = m.contiguous(), v.contiguous()
        ctx.save_for_backward(m, v)
        ctx.seed = seed
        return vae_latent(m, v, seed)

    @staticmethod
    def backward(ctx, dz, dkl):
        m, v = ctx.saved_tensors
        dm, dv, (rows, D) = torch.empty_like(m), torch.empty_like(v), m.shape
        BLOCK = min(1024, triton.next_power_of_2(D))
        latent_backward_kernel[(rows, triton.cdiv(D, BLOCK))](
            m, v, dz.contiguous(), dkl.contiguous(), dm, dv, D, ctx.seed, BLOCK=BLOCK
        )
        return dm if ctx.needs_input_grad[0] else None, dv if ctx.needs_input_grad[1] else None, None


def vae_latent_autograd(m, v, seed):
    return VAELatent.apply(m, v, seed)
