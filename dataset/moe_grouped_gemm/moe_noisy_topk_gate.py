"""Noisy top-k gate: experts are chosen with noise whose size is learned; the weights come as whole rows.

Forward    h = z + n softplus(v),  n normal numbers drawn from a seed;   S the k largest h of a token;
           p_e = exp(h_e) / sum over S of exp(h) for e in S, and 0 elsewhere
Backward   S is piecewise constant:   dh_e = p_e (dp_e - <dp, p>),   dz = dh,   dv = dh n sigmoid(v)

Forward schedule: a program holds a tile of tokens with all experts, draws n by (seed, place), and takes the
first largest k times, marking it. h and the noise stay in registers.
Backward schedule: the same owner, without the choice: p is 0 for experts that were not chosen, and softmax's
backward multiplies with p, so the row p, an output, is mask and statistic in one. z is not needed at all.
What is needed again is the noise, as the factor of dv; drawn from the same seed it costs some integer
operations where a saved (T, E) tensor would be written, kept and read.

op: moe_noisy_router
schedule: index_or_seed_replay, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(E):
    BLOCK_E = triton.next_power_of_2(E)
    return {"BLOCK_T": max(1, min(32, 2048 // BLOCK_E)), "BLOCK_E": BLOCK_E}


@triton.jit
def noisy_gate_kernel(z_ptr, v_ptr, p_ptr, T, E, K, seed, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    offs = t[:, None] * E + e[None, :]
    z = tl.load(z_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    softplus = tl.where(v > 20, v, tl.log(1 + tl.exp(tl.where(v > 20, 0.0, v))))
    h = tl.where(e[None, :] < E, z + tl.randn(seed, offs) * softplus, -float("inf"))
    left = h
    for _ in range(K):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], e[None, :], BLOCK_E), axis=1)
        left = tl.where(e[None, :] == first[:, None], -float("inf"), left)
    chosen = (left != h) & (e[None, :] < E)
    exps = tl.where(chosen, tl.exp(h - tl.max(h, axis=1)[:, None]), 0.0)
    p = exps / tl.sum(exps, axis=1)[:, None]
    tl.store(p_ptr + offs, p.to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit
def noise_kernel(n_ptr, count, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(n_ptr + i, tl.randn(seed, i), mask=i < count)


@autodiff(inputs_require_grad=(0, 1))
def noisy_topk_gate(z, v, k, seed):
    """z, v: (T, E), finite: the logits, and what the noise's size is made of; gives weights (T, E)."""
    z, v, (T, E) = z.contiguous(), v.contiguous(), z.shape
    if z.shape != v.shape or not 1 <= k <= E or E > 2048:
        raise ValueError(f"{k} of {E} experts (at most 2048), z {tuple(z.shape)} and v {tuple(v.shape)}")
    p, tiles = torch.empty_like(z), tiling(E)
    noisy_gate_kernel[(triton.cdiv(T, tiles["BLOCK_T"]),)](z, v, p, T, E, k, seed, **tiles)
    return p


def reference(z, v, k, seed):
    n = torch.empty(z.shape, device=z.device, dtype=torch.float32)
    noise_kernel[(triton.cdiv(n.numel(), 512),)](n, n.numel(), seed, BLOCK=512)
    h = z + n.to(z.dtype) * torch.nn.functional.softplus(v)
    chosen = torch.zeros_like(h, dtype=torch.bool).scatter(1, h.topk(k, dim=1).indices, True)
    return torch.softmax(h.masked_fill(~chosen, -float("inf")), dim=1)


SWEEP = [{"T": 65536, "E": 64, "K": 4}, {"T": 16383, "E": 160, "K": 6}]
SWEEP_CPU = [{"T": 26, "E": 8, "K": 2}, {"T": 70, "E": 19, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """The noise decides for the first 128 tokens; of the rest each has k experts that stand out, as of many
    thousands of choices one would hang on how h is rounded."""
    T, E, k = dims["T"], dims["E"], min(dims["K"], dims["E"])
    z, v = (torch.randn(T, E, device=device, dtype=dtype) for _ in range(2))
    z[128:] += 12 * (torch.rand(T, E, device=device).argsort(dim=1) < k)[128:]
    return (z, v), {"k": k, "seed": 29}


# ---- backward ----


@triton.jit
def noisy_gate_backward_kernel(
    v_ptr, p_ptr, dp_ptr, dz_ptr, dv_ptr, T, E, seed, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    offs = t[:, None] * E + e[None, :]
    v = tl.load(v_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    dp = tl.load(dp_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    dh = p * (dp - tl.sum(dp * p, axis=1)[:, None])
    dv = dh * tl.randn(seed, offs) * tl.sigmoid(v)
    tl.store(dz_ptr + offs, dh.to(dz_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=inside)


class NoisyTopKGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, v, k, seed):
        p = noisy_topk_gate(z, v, k, seed)
        ctx.save_for_backward(v.contiguous(), p)
        ctx.seed = seed
        return p

    @staticmethod
    def backward(ctx, dp):
        v, p = ctx.saved_tensors
        (T, E), tiles, needs = v.shape, tiling(v.shape[1]), ctx.needs_input_grad
        dz, dv = torch.empty_like(p), torch.empty_like(v)
        grid = (triton.cdiv(T, tiles["BLOCK_T"]),)
        noisy_gate_backward_kernel[grid](v, p, dp.contiguous(), dz, dv, T, E, ctx.seed, **tiles)
        return dz if needs[0] else None, dv if needs[1] else None, None, None


def noisy_topk_gate_autograd(z, v, k, seed):
    return NoisyTopKGate.apply(z, v, k, seed)
