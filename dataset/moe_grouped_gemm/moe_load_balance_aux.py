"""Load-balancing loss of a router: share of the choices times mean probability, summed over experts.

Forward    p_t = softmax(z_t),  f_e = (choices of e) / (T k),  L = E sum_e f_e mean_t p_te
Backward   f is a count and has no gradient. With c_e = E f_e / T:  L = sum_te c_e p_te, and
           dz_te = dL p_te (c_e - <p_t, c>)

Forward schedule: the mean runs over tokens and the softmax over experts, so a program takes a group of
tokens with all experts in registers: it sums the columns of p and counts the choices by comparison, and
stores both in its slot. One program adds the slots, and stores L and the E numbers c.
Backward schedule: the loss couples all tokens, but only through c, E numbers that the forward made. Each
token is then alone: its owner rebuilds p from z, reduces <p, c> and stores dz; one read and one write of
(T, E), no probabilities saved, and the counting is not repeated. dL is read in the kernel: a scalar upstream
needs no synchronisation with the host.

op: moe_aux_loss
schedule: partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


GROUP = 128  # tokens of one slot


@triton.jit
def load_probabilities(z_ptr, t, e, T, E):
    """Softmax of rows t; rows past T are of equal shares, columns past E are 0."""
    mask = (t[:, None] < T) & (e[None, :] < E)
    z = tl.load(z_ptr + t[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.where(e[None, :] < E, z, -float("inf"))
    exps = tl.exp(z - tl.max(z, axis=1)[:, None])
    return exps / tl.sum(exps, axis=1)[:, None]


@triton.jit
def partial_kernel(
    z_ptr, index_ptr, p_slots_ptr, count_slots_ptr, T, E, K,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    p_sum = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    count = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for start in range(0, GROUP, BLOCK_T):
        t = group * GROUP + start + tl.arange(0, BLOCK_T)
        p = load_probabilities(z_ptr, t, e, T, E)
        p_sum += tl.where(t[:, None] < T, p, 0.0)
        for k in range(K):
            chosen = tl.load(index_ptr + t * K + k, mask=t < T, other=-1)
            count += (chosen[:, None] == e[None, :]).to(tl.float32)
    tl.store(p_slots_ptr + group * E + e, tl.sum(p_sum, axis=0), mask=e < E)
    tl.store(count_slots_ptr + group * E + e, tl.sum(count, axis=0), mask=e < E)


@triton.jit
def loss_kernel(
    p_slots_ptr, count_slots_ptr, loss_ptr, c_ptr, T, E, K, groups,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    p_sum = tl.zeros([BLOCK_G, BLOCK_E], dtype=tl.float32)
    count = tl.zeros([BLOCK_G, BLOCK_E], dtype=tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)
        mask = (group[:, None] < groups) & (e[None, :] < E)
        offs = group[:, None] * E + e[None, :]
        p_sum += tl.load(p_slots_ptr + offs, mask=mask, other=0.0)
        count += tl.load(count_slots_ptr + offs, mask=mask, other=0.0)
    f = tl.sum(count, axis=0) / T / K
    c = f * E / T
    tl.store(c_ptr + e, c, mask=e < E)
    tl.store(loss_ptr, tl.sum(c * tl.sum(p_sum, axis=0)))


def load_balance_forward(z, index):
    (T, E), K = z.shape, index.shape[1]
    if index.shape[0] != T:
        raise ValueError(f"choices of {index.shape[0]} tokens for {T}")
    if T == 0 or E == 0 or K == 0:
        raise ValueError("there is no mean without tokens, experts and choices")
    groups, BLOCK_E = triton.cdiv(T, GROUP), triton.next_power_of_2(E)
    options = {"device": z.device, "dtype": torch.float32}
    p_slots, count_slots = (torch.empty((groups, E), **options) for _ in range(2))
    loss, c = torch.empty((), **options), torch.empty(E, **options)
    partial_kernel[(groups,)](
        z, index, p_slots, count_slots, T, E, K, GROUP=GROUP, BLOCK_T=8, BLOCK_E=BLOCK_E
    )
    loss_kernel[(1,)](p_slots, count_slots, loss, c, T, E, K, groups, BLOCK_G=8, BLOCK_E=BLOCK_E)
    return loss, c


@autodiff(inputs_require_grad=(0,))
def load_balance_loss(z, index):
    """z: (T, E), the router's logits; index: int64 (T, k), the experts that each token took. fp32 scalar."""
    return load_balance_forward(z.contiguous(), index.contiguous())[0]


def reference(z, index):
    (T, E), K = z.shape, index.shape[1]
    f = torch.bincount(index.flatten(), minlength=E) / (T * K)
    return E * (f.to(z.dtype) * torch.softmax(z, dim=1).mean(0)).sum()


SWEEP = [{"T": 16384, "E": 64, "K": 6}, {"T": 8191, "E": 160, "K": 2}]
SWEEP_CPU = [{"T": 261, "E": 9, "K": 2}, {"T": 40, "E": 16, "K": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["T"], dims["E"], device=device, dtype=dtype)
    return z, z.topk(min(dims["K"], dims["E"]), dim=1).indices


# ---- backward ----


@triton.jit
def load_balance_backward_kernel(
    z_ptr, c_ptr, dloss_ptr, dz_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    p = load_probabilities(z_ptr, t, e, T, E)
    c = tl.load(c_ptr + e, mask=e < E, other=0.0)[None, :]
    dloss = tl.load(dloss_ptr)
    dz = dloss * p * (c - tl.sum(p * c, axis=1)[:, None])
    mask = (t[:, None] < T) & (e[None, :] < E)
    tl.store(dz_ptr + t[:, None] * E + e[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)


class LoadBalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, index):
        z = z.contiguous()
        loss, c = load_balance_forward(z, index.contiguous())
        ctx.save_for_backward(z, c)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        z, c = ctx.saved_tensors
        T, E = z.shape
        dz = torch.empty_like(z)
        load_balance_backward_kernel[(triton.cdiv(T, 8),)](
            z, c, dloss.contiguous(), dz, T, E, BLOCK_T=8, BLOCK_E=triton.next_power_of_2(E)
        )
        return dz, None


def load_balance_loss_autograd(z, index):
    return LoadBalanceLoss.apply(z, index)
