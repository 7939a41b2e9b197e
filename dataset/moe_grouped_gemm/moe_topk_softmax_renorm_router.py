"""Mixture-of-experts router: softmax, the k largest probabilities, renormalised.

Forward    p = softmax(z);  i_1 .. i_k the experts of the k largest p;  w_j = p_{i_j} / S,  S = sum_j p_{i_j}
Backward   the selection is piecewise constant; there  dp_{i_j} = (dw_j - <dw, w>) / S,
           dz = p * (dp - <dp, p>), and <dp, p> = sum_j (dw_j - <dw, w>) w_j = 0 when sum_j w_j = 1,
           so dz_{i_j} = w_j (dw_j - <dw, w>) and dz = 0 off the selection

Forward schedule: a program owns a token's row in one tile; k rounds of argmax, each masking its winner. The
ids are an output, without gradient.
Backward schedule: the same owner. The two normalisations cancel, so neither p nor S is needed: the saved
ids and weights, k numbers each, route the corrected gradient to their slots of a zeroed tile, which is
stored once. The logits are never read.

op: moe_router
schedule: row_reduce_correct, index_or_seed_replay
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def router_kernel(z_ptr, w_ptr, ids_ptr, E, K, BLOCK_E: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    z = tl.load(z_ptr + token * E + experts, mask=experts < E, other=-float("inf")).to(tl.float32)
    top = tl.max(z, axis=0)
    total = 0.0
    left = z
    for _ in range(K):
        total += tl.exp(tl.max(left, axis=0) - top)
        left = tl.where(experts == tl.argmax(left, axis=0), -float("inf"), left)
    left = z
    for j in range(K):
        winner = tl.argmax(left, axis=0)
        tl.store(w_ptr + token * K + j, tl.exp(tl.max(left, axis=0) - top) / total)
        tl.store(ids_ptr + token * K + j, winner.to(tl.int64))
        left = tl.where(experts == winner, -float("inf"), left)


@autodiff(inputs_require_grad=(0,))
def moe_router(logits, k):
    """logits: (T, E). Returns weights (T, k) and the experts' ids (T, k), in falling order of weight."""
    T, E = logits.shape
    if not 1 <= k <= E:
        raise ValueError(f"cannot choose {k} of {E} experts")
    w = torch.empty((T, k), device=logits.device, dtype=logits.dtype)
    ids = torch.empty((T, k), device=logits.device, dtype=torch.int64)
    router_kernel[(T,)](logits.contiguous(), w, ids, E, k, BLOCK_E=triton.next_power_of_2(E))
    return w, ids


def reference(logits, k):
    p, ids = torch.softmax(logits, dim=-1).topk(k, dim=-1)
    return p / p.sum(-1, keepdim=True), ids


SWEEP = [{"T": 16384, "E": 256, "k": 8}, {"T": 65536, "E": 64, "k": 6}, {"T": 32771, "E": 160, "k": 6}]
SWEEP_CPU = [{"T": 37, "E": 12, "k": 2}, {"T": 5, "E": 40, "k": 6}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["T"], dims["E"], device=device, dtype=dtype), dims["k"]


# ---- backward ----


@triton.jit
def router_backward_kernel(w_ptr, ids_ptr, dw_ptr, dz_ptr, E, K, BLOCK_E: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    dot = 0.0
    for j in range(K):
        w = tl.load(w_ptr + token * K + j).to(tl.float32)
        dot += w * tl.load(dw_ptr + token * K + j).to(tl.float32)
    dz = tl.zeros([BLOCK_E], dtype=tl.float32)
    for j in range(K):
        w = tl.load(w_ptr + token * K + j).to(tl.float32)
        dw = tl.load(dw_ptr + token * K + j).to(tl.float32)
        dz = tl.where(experts == tl.load(ids_ptr + token * K + j), w * (dw - dot), dz)
    tl.store(dz_ptr + token * E + experts, dz, mask=experts < E)


class MoeRouter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k):
        w, ids = moe_router(logits, k)
        ctx.save_for_backward(w, ids)
        ctx.mark_non_differentiable(ids)
        ctx.E = logits.shape[1]
        return w, ids

    @staticmethod
    def backward(ctx, dw, _):
        w, ids = ctx.saved_tensors
        dw = dw.contiguous()
        T, k = w.shape
        dz = torch.empty((T, ctx.E), device=w.device, dtype=w.dtype)
        router_backward_kernel[(T,)](w, ids, dw, dz, ctx.E, k, BLOCK_E=triton.next_power_of_2(ctx.E))
        return dz, None


def moe_router_autograd(logits, k):
    return MoeRouter.apply(logits, k)
