"""The bottleneck of a variational autoencoder: a draw from the posterior and its divergence from the prior.

Forward    s = exp(lv / 2),   z = mu + s eps,  eps the normal numbers of a seed;
           KL = 1/2 sum over a row of (mu^2 + s^2 - 1 - lv)
Backward   with k = dKL of the row:  dmu = dz + k mu,
           dlv = (dz s eps + k (s^2 - 1)) / 2,  as ds/dlv = s / 2 and ds^2/dlv = s^2

Forward schedule: a program owns a row, walks it by tiles, and adds up KL while it has mu and lv for z.
Backward schedule: tile by tile, as a row's number k is known and nothing is summed: any tile can start at
once. Both paths into mu and lv, by the draw and by the divergence, end in the same two numbers, so they are
added in registers, where two separate backwards would write and add whole tensors. eps is drawn again;
solving z = mu + s eps for it would need z, and divide by an s that may be tiny.

op: reparam_kl
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def reparam_kernel(mu_ptr, lv_ptr, z_ptr, kl_ptr, N, seed, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        offs = row * N + cols
        mu = tl.load(mu_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
        lv = tl.load(lv_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
        s = tl.exp(0.5 * lv)
        z = mu + s * tl.randn(seed, offs)
        tl.store(z_ptr + offs, z.to(z_ptr.dtype.element_ty), mask=cols < N)
        total += mu * mu + s * s - 1 - lv  # 0 past the end of the row
    tl.store(kl_ptr + row, 0.5 * tl.sum(total, axis=0))


@autodiff(inputs_require_grad=(0, 1))
def reparam_kl(mu, lv, seed):
    """mu, lv: (M, N), mean and logarithm of the variance; gives z (M, N) and KL, float32 (M)."""
    if mu.shape != lv.shape:
        raise ValueError(f"mu {tuple(mu.shape)} and lv {tuple(lv.shape)} need one shape")
    mu, lv = mu.contiguous(), lv.contiguous()
    M, N = mu.shape
    z, kl = torch.empty_like(mu), torch.empty(M, device=mu.device, dtype=torch.float32)
    BLOCK = min(1024, triton.next_power_of_2(N))
    reparam_kernel[(M,)](mu, lv, z, kl, N, seed, BLOCK=BLOCK)
    return z, kl


@triton.jit
def noise_kernel(out_ptr, n, seed, BLOCK: tl.constexpr):
    """eps alone, for the reference."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.randn(seed, offs), mask=offs < n)


def reference(mu, lv, seed):
    eps = torch.empty(mu.shape, device=mu.device)
    noise_kernel[(triton.cdiv(eps.numel(), 256),)](eps, eps.numel(), seed, BLOCK=256)
    kl = 0.5 * (mu * mu + lv.exp() - 1 - lv).sum(1)
    return mu + torch.exp(0.5 * lv) * eps, kl if mu.dtype == torch.float64 else kl.float()


SWEEP = [{"M": 65536, "N": 512}, {"M": 5003, "N": 2049}]
SWEEP_CPU = [{"M": 29, "N": 33}, {"M": 2, "N": 1500}]


def make_args(dims, device="cuda", dtype=torch.float32):
    mu, lv = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return (mu, lv), {"seed": 20}


# ---- backward ----


@triton.jit
def reparam_backward_kernel(mu_ptr, lv_ptr, dz_ptr, dkl_ptr, dmu_ptr, dlv_ptr, N, seed, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = row * N + cols
    k = tl.load(dkl_ptr + row)
    mu = tl.load(mu_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    s = tl.exp(0.5 * tl.load(lv_ptr + offs, mask=cols < N, other=0.0).to(tl.float32))
    dz = tl.load(dz_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    dlv = 0.5 * (dz * s * tl.randn(seed, offs) + k * (s * s - 1))
    tl.store(dmu_ptr + offs, (dz + k * mu).to(dmu_ptr.dtype.element_ty), mask=cols < N)
    tl.store(dlv_ptr + offs, dlv.to(dlv_ptr.dtype.element_ty), mask=cols < N)


class ReparamKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mu, lv, seed):
        mu, lv = mu.contiguous(), lv.contiguous()
        ctx.save_for_backward(mu, lv)
        ctx.seed = seed
        return reparam_kl(mu, lv, seed)

    @staticmethod
    def backward(ctx, dz, dkl):
        mu, lv = ctx.saved_tensors
        M, N = mu.shape
        dmu, dlv = torch.empty_like(mu), torch.empty_like(lv)
        BLOCK = min(1024, triton.next_power_of_2(N))
        reparam_backward_kernel[(M, triton.cdiv(N, BLOCK))](
            mu, lv, dz.contiguous(), dkl.contiguous(), dmu, dlv, N, ctx.seed, BLOCK=BLOCK
        )
        needs = ctx.needs_input_grad
        return dmu if needs[0] else None, dlv if needs[1] else None, None


def reparam_kl_autograd(mu, lv, seed):
    return ReparamKL.apply(mu, lv, seed)
