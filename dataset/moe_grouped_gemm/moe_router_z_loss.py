"""The z-loss of a router: it keeps the logits small by their normaliser.

Forward    l_t = log sum_e exp(z_te),   L = (1 / T) sum_t l_t^2
Backward   dl_t/dz_te = exp(z_te - l_t) = p_te, so   dz_te = dL (2 l_t / T) p_te

Forward schedule: experts are few, so a program holds a tile of tokens with all their experts, and makes its
tokens' l. It stores them and the sum of their squares; one program adds the sums.
Backward schedule: a mean couples the tokens by a constant alone. The tile's owner reads z and the saved l,
rebuilds p by one exp a number, without the maximum and the sum that a softmax needs, and stores dz: one read
and one write of (T, E). l is T numbers, an E-th of what saving p would cost. dL is read in the kernel.

op: moe_z_loss
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(E):
    BLOCK_E = triton.next_power_of_2(E)
    return {"BLOCK_T": max(1, min(64, 4096 // BLOCK_E)), "BLOCK_E": BLOCK_E}


@triton.jit
def lse_kernel(z_ptr, lse_ptr, sums_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    mask = (t[:, None] < T) & (e[None, :] < E)
    z = tl.load(z_ptr + t[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.where(e[None, :] < E, z, -float("inf"))
    largest = tl.max(z, axis=1)
    lse = largest + tl.log(tl.sum(tl.exp(z - largest[:, None]), axis=1))
    lse = tl.where(t < T, lse, 0.0)
    tl.store(lse_ptr + t, lse, mask=t < T)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(lse * lse, axis=0))


@triton.jit
def mean_kernel(sums_ptr, loss_ptr, count, T, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums_ptr + i, mask=i < count, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / T)


def z_loss_forward(z):
    T, E = z.shape
    if T == 0 or E == 0:
        raise ValueError("there is no mean without tokens and experts")
    if E > 4096:
        raise ValueError(f"{E} experts do not fit one tile")
    tiles = tiling(E)
    count = triton.cdiv(T, tiles["BLOCK_T"])
    loss, lse, sums = (torch.empty(s, device=z.device, dtype=torch.float32) for s in ((), (T,), (count,)))
    lse_kernel[(count,)](z, lse, sums, T, E, **tiles)
    mean_kernel[(1,)](sums, loss, count, T, BLOCK=1024)
    return loss, lse


@autodiff(inputs_require_grad=(0,))
def router_z_loss(z):
    """z: (T, E), the router's logits; gives a float32 scalar."""
    return z_loss_forward(z.contiguous())[0]


def reference(z):
    return torch.logsumexp(z, dim=1).pow(2).mean()


SWEEP = [{"T": 65536, "E": 64}, {"T": 16383, "E": 160}]
SWEEP_CPU = [{"T": 45, "E": 14}, {"T": 150, "E": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["T"], dims["E"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def z_loss_backward_kernel(
    z_ptr, lse_ptr, dloss_ptr, dz_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    mask = (t[:, None] < T) & (e[None, :] < E)
    offs = t[:, None] * E + e[None, :]
    lse = tl.load(lse_ptr + t, mask=t < T, other=0.0)
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    slope = 2 * tl.load(dloss_ptr) * lse / T
    dz = slope[:, None] * tl.exp(z - lse[:, None])
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)


class RouterZLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        z = z.contiguous()
        loss, lse = z_loss_forward(z)
        ctx.save_for_backward(z, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        z, lse = ctx.saved_tensors
        (T, E), tiles = z.shape, tiling(z.shape[1])
        dz = torch.empty_like(z)
        grid = (triton.cdiv(T, tiles["BLOCK_T"]),)
        z_loss_backward_kernel[grid](z, lse, dloss.contiguous(), dz, T, E, **tiles)
        return dz


def router_z_loss_autograd(z):
    return RouterZLoss.apply(z)
