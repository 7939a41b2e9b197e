"""Weights drawn softly to the centres of a codebook: quantisation that trains (differentiable k-means).

Forward    a_ic = softmax over c of -(w_i - e_c)^2 / t,   y_i = sum_c a_ic e_c
Backward   with u_ic = w_i - e_c, h_ic = dy_i a_ic (e_c - y_i) for the softmax's argument -u_ic^2 / t:
           dw_i = -(2 / t) sum_c h_ic u_ic,    de_c = sum_i (dy_i a_ic + (2 / t) h_ic u_ic)

Forward schedule: a program owns a tile of weights; the centres, at most 64, are a second axis in registers,
so assignments are never stored; they would be as many as all weights for each centre.
Backward schedule: the tile's owner makes the assignments again, dw is complete in it. de sums over all
weights: G programs walk the tiles with a (weights, centres) accumulator that is pressed into one row at the
end, and a second kernel adds G rows. h has both ends of a difference: what pulls w to a centre pulls the
centre to w.

op: soft_clustering
schedule: same_tile_pointwise, recompute_from_stats, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def assignments(w, e, c, C, t):
    """u and a, of weights by centres."""
    u = w[:, None] - e[None, :]
    score = tl.where(c[None, :] < C, -u * u / t, -float("inf"))
    a = tl.exp(score - tl.max(score, axis=1)[:, None])
    return u, a / tl.sum(a, axis=1)[:, None]


@triton.jit
def cluster_kernel(w_ptr, e_ptr, y_ptr, N, C, t, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    w = tl.load(w_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    _, a = assignments(w, e, c, C, t)
    y = tl.sum(a * e[None, :], axis=1)
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < N)


def tiling(e):
    C = e.numel()
    if not 1 <= C <= 64:
        raise ValueError(f"{C} centres: need 1 to 64")
    return {"BLOCK": 128, "BLOCK_C": triton.next_power_of_2(C)}


@autodiff(inputs_require_grad=(0, 1))
def soft_clustering(w, e, t=0.1):
    """w: any shape; e: (C), the centres; t: the temperature, positive."""
    w, e, tiles, y = w.contiguous(), e.contiguous(), tiling(e), torch.empty_like(w)
    if t <= 0:
        raise ValueError("the temperature must be positive")
    grid = (max(1, triton.cdiv(w.numel(), 128)),)
    cluster_kernel[grid](w, e, y, w.numel(), e.numel(), t, **tiles)
    return y


def reference(w, e, t=0.1):
    a = torch.softmax(-(w[..., None] - e).pow(2) / t, dim=-1)
    return (a * e).sum(-1)


SWEEP = [{"N": 4096, "K": 4096, "C": 16}, {"N": 1021, "K": 3001, "C": 33}]
SWEEP_CPU = [{"N": 29, "K": 20, "C": 8}, {"N": 7, "K": 33, "C": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype)
    return w, torch.randn(dims["C"], device=device, dtype=dtype), 0.3


# ---- backward ----

MAX_GROUPS = 512


@triton.jit
def cluster_backward_kernel(
    w_ptr, e_ptr, dy_ptr, dw_ptr, part_ptr, N, C, t, G, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    e = tl.load(e_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    de = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(N, BLOCK), G):
        i = tile * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        w = tl.load(w_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        u, a = assignments(w, e, c, C, t)
        y = tl.sum(a * e[None, :], axis=1)
        share = dy[:, None] * a
        pull = share * (e[None, :] - y[:, None]) * u * (2 / t)
        tl.store(dw_ptr + i, (-tl.sum(pull, axis=1)).to(dw_ptr.dtype.element_ty), mask=i < N)
        de += share + pull
    tl.store(part_ptr + pid * C + c, tl.sum(de, axis=0), mask=c < C)


@triton.jit
def sum_slots_kernel(part_ptr, de_ptr, G, C, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    for start in range(0, G, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        mask = (slot[:, None] < G) & (c[None, :] < C)
        total += tl.load(part_ptr + slot[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(de_ptr + c, tl.sum(total, axis=0).to(de_ptr.dtype.element_ty), mask=c < C)


class SoftClustering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, e, t):
        w, e = w.contiguous(), e.contiguous()
        ctx.save_for_backward(w, e)
        ctx.t = t
        return soft_clustering(w, e, t)

    @staticmethod
    def backward(ctx, dy):
        w, e = ctx.saved_tensors
        N, C, tiles = w.numel(), e.numel(), tiling(e)
        G = max(1, min(MAX_GROUPS, triton.cdiv(N, tiles["BLOCK"])))
        dw, de = torch.empty_like(w), torch.empty_like(e)
        part = torch.empty((G, C), device=w.device, dtype=torch.float32)
        cluster_backward_kernel[(G,)](w, e, dy.contiguous(), dw, part, N, C, ctx.t, G, **tiles)
        needs = ctx.needs_input_grad
        if needs[1]:
            sum_slots_kernel[(1,)](part, de, G, C, **tiles)
        return dw if needs[0] else None, de if needs[1] else None, None


def soft_clustering_autograd(w, e, t=0.1):
    return SoftClustering.apply(w, e, t)
