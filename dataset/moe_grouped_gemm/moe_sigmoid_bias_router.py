"""Router with sigmoid scores, chosen by score plus bias, weighted by score alone.

Forward    s_e = sigmoid(z_e),  I = the k largest of s_e + b_e,  w_e = c s_e / sum_{j in I} s_j for e in I
Backward   with n = sum_{j in I} s_j and u = dw:  ds_e = (c u_e - <u, w>) / n  (u_e = 0 outside I gives no
           term: only chosen scores are read), dz_e = ds_e s_e (1 - s_e) for e in I and 0 elsewhere.
           Derivation: dw_e/ds_j = c ([e = j] / n - s_e / n^2) = (c [e = j] - w_e) / n.
           The bias decides which experts are chosen and nothing else: a comparison has no gradient.

Forward schedule: a program owns a tile of tokens with all experts in registers; the k largest are taken one
after another (maximum, first lane that has it, masked away). It stores the indices and weights.
Backward schedule: the same owner. The saved indices replay the choice; taking the k largest again would cost
more and could choose otherwise among equals. z alone is read again, at the k chosen places; the row sums n
and <u, w> are over k numbers, and the row of dz is built in registers from k comparisons and stored once, so
there is no zero fill and no scatter.

op: moe_router
schedule: index_or_seed_replay, row_reduce_correct
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def router_kernel(
    z_ptr, b_ptr, w_ptr, index_ptr, T, E, K, scale,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    mask = (t[:, None] < T) & (e[None, :] < E)
    z = tl.load(z_ptr + t[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-z))
    b = tl.load(b_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    rank = tl.where(e[None, :] < E, s + b[None, :], -float("inf"))
    chosen_s = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        best = tl.max(rank, axis=1)
        first = tl.min(tl.where(rank == best[:, None], e[None, :], BLOCK_E), axis=1)
        hit = e[None, :] == first[:, None]
        score = tl.sum(tl.where(hit, s, 0.0), axis=1)
        chosen_s = tl.where(slot[None, :] == k, score[:, None], chosen_s)
        chosen = tl.where(slot[None, :] == k, first[:, None], chosen)
        rank = tl.where(hit, -float("inf"), rank)
    out_mask = (t[:, None] < T) & (slot[None, :] < K)
    offs = t[:, None] * K + slot[None, :]
    w = scale * chosen_s / tl.sum(chosen_s, axis=1)[:, None]
    tl.store(w_ptr + offs, w, mask=out_mask)
    tl.store(index_ptr + offs, chosen, mask=out_mask)


def router_forward(z, b, k, scale):
    T, E = z.shape
    if not 1 <= k <= E:
        raise ValueError(f"{k} experts cannot be chosen of {E}")
    w = torch.empty((T, k), device=z.device, dtype=z.dtype)
    index = torch.empty((T, k), device=z.device, dtype=torch.int32)
    BLOCK_E, BLOCK_K = triton.next_power_of_2(E), triton.next_power_of_2(k)
    router_kernel[(triton.cdiv(T, 8),)](
        z, b, w, index, T, E, k, scale, BLOCK_T=8, BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K
    )
    return w, index


@autodiff(inputs_require_grad=(0,))
def moe_sigmoid_router(z, b, k, scale):
    """z: (T, E); b: (E); gives the weights (T, k), the largest of score plus bias first."""
    return router_forward(z.contiguous(), b.contiguous(), k, scale)[0]


def reference(z, b, k, scale):
    s = torch.sigmoid(z)
    chosen = s.gather(1, (s + b).topk(k, dim=1).indices)
    return scale * chosen / chosen.sum(1, keepdim=True)


SWEEP = [{"T": 16384, "E": 256, "K": 8}, {"T": 8191, "E": 160, "K": 6}]
SWEEP_CPU = [{"T": 30, "E": 16, "K": 4}, {"T": 7, "E": 21, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Of twice as many tokens those whose K + 1 largest scores lie farthest apart: no choice among thousands
    hangs on how a sigmoid is rounded."""
    T, E, K = (dims[name] for name in ("T", "E", "K"))
    z = torch.randn(2 * T, E, device=device, dtype=dtype)
    b = 0.1 * torch.randn(E, device=device, dtype=dtype)
    top = (torch.sigmoid(z) + b).topk(min(K + 1, E), dim=1).values
    apart = -top.diff(dim=1, prepend=torch.full_like(top[:, :1], float("inf"))).amax(1)
    return z[apart.topk(T).indices], b, K, 2.5


# ---- backward ----


@triton.jit
def router_backward_kernel(
    z_ptr, index_ptr, dw_ptr, dz_ptr, T, E, K, scale,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, BLOCK_K)
    mask = (t[:, None] < T) & (slot[None, :] < K)
    index = tl.load(index_ptr + t[:, None] * K + slot[None, :], mask=mask, other=0)
    u = tl.load(dw_ptr + t[:, None] * K + slot[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t[:, None] * E + index, mask=mask, other=0.0).to(tl.float32)
    s = tl.where(mask, 1.0 / (1.0 + tl.exp(-z)), 0.0)
    n = tl.where(t < T, tl.sum(s, axis=1), 1.0)
    mean = scale * tl.sum(u * s, axis=1) / n  # <u, w>
    dz_chosen = (scale * u - mean[:, None]) / n[:, None] * s * (1.0 - s)

    e = tl.arange(0, BLOCK_E)
    dz = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for k in range(K):
        this = slot[None, :] == k
        expert = tl.sum(tl.where(this, index, 0), axis=1)
        value = tl.sum(tl.where(this, dz_chosen, 0.0), axis=1)
        dz = tl.where(e[None, :] == expert[:, None], value[:, None], dz)
    tl.store(dz_ptr + t[:, None] * E + e[None, :], dz, mask=(t[:, None] < T) & (e[None, :] < E))


class MoeSigmoidRouter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, b, k, scale):
        z = z.contiguous()
        w, index = router_forward(z, b.contiguous(), k, scale)
        ctx.save_for_backward(z, index)
        ctx.scale = scale
        return w

    @staticmethod
    def backward(ctx, dw):
        z, index = ctx.saved_tensors
        (T, E), k = z.shape, index.shape[1]
        dz = torch.empty_like(z)
        BLOCK_E, BLOCK_K = triton.next_power_of_2(E), triton.next_power_of_2(k)
        router_backward_kernel[(triton.cdiv(T, 8),)](
            z, index, dw.contiguous(), dz, T, E, k, ctx.scale, BLOCK_T=8, BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K
        )
        return dz, None, None, None


def moe_sigmoid_router_autograd(z, b, k, scale):
    return MoeSigmoidRouter.apply(z, b, k, scale)
