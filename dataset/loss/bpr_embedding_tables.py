"""Bayesian personalised ranking from embedding tables: a user prefers what was bought to what was sampled.

Forward    for triple i of a user a, a bought item p and a sampled item n:
           d_i = <U_a, V_p - V_n>,  l_i = log(1 + exp(-d_i)), one loss a triple
Backward   c_i = dl_i/dd_i = -sigmoid(-d_i), saved;  with g = dl_i c_i:
           row a of dU gets g (V_p - V_n),  row p of dV gets g U_a,  row n of dV gets -g U_a

Forward schedule: a program owns several triples, gathers their three rows tile by tile, and takes one dot
with the difference of the items, whose two scores would be near each other.
Backward schedule: gradients go where the rows came from. Tables are large and triples few beside them, so
rows meet seldom: the forward's ownership stays, and a program adds its three rows to zeroed fp32 tables by
atomics, without sorting triples by users and then again by items. A popular item's row is a hot spot; the
adds of a tile of columns are neighbours, which the memory system takes as one line. c, the only number of a
triple that a dot would be needed for again, comes from the forward.

op: bpr_loss
schedule: atomic_accumulate
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_D": 64}


@triton.jit
def load_index(ptr, i, M):
    return tl.load(ptr + i, mask=i < M, other=0)


@triton.jit
def gather(table_ptr, index, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(table_ptr + index[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def bpr_kernel(
    u_ptr, v_ptr, user_ptr, bought_ptr, sampled_ptr, loss_ptr, c_ptr, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    a, p, n = load_index(user_ptr, i, M), load_index(bought_ptr, i, M), load_index(sampled_ptr, i, M)
    products = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        apart = gather(v_ptr, p, i < M, d, D) - gather(v_ptr, n, i < M, d, D)
        products += gather(u_ptr, a, i < M, d, D) * apart
    margin = tl.sum(products, axis=1)
    loss = tl.where(margin < 0, -margin, 0.0) + tl.log(1 + tl.exp(tl.where(margin < 0, margin, -margin)))
    tl.store(loss_ptr + i, loss, mask=i < M)
    tl.store(c_ptr + i, -tl.sigmoid(-margin), mask=i < M)


def bpr_forward(u, v, users, bought, sampled):
    M, D = users.numel(), u.shape[1]
    if v.shape[1] != D or not users.shape == bought.shape == sampled.shape:
        raise ValueError("tables have one width, and each triple a user and two items")
    loss, c = (torch.empty(M, device=u.device, dtype=torch.float32) for _ in range(2))
    bpr_kernel[(triton.cdiv(M, TILE["BLOCK_M"]),)](u, v, users, bought, sampled, loss, c, M, D, **TILE)
    return loss, c


@autodiff(inputs_require_grad=(0, 1))
def bpr_loss(u, v, users, bought, sampled):
    """u: (users, D); v: (items, D); users, bought, sampled: int64 (M), rows of u, v and v; gives (M),
    float32."""
    indices = (users.contiguous(), bought.contiguous(), sampled.contiguous())
    return bpr_forward(u.contiguous(), v.contiguous(), *indices)[0]


def reference(u, v, users, bought, sampled):
    return torch.nn.functional.softplus(-(u[users] * (v[bought] - v[sampled])).sum(-1))


SWEEP = [{"M": 262144, "U": 500000, "V": 100000, "D": 64}, {"M": 65537, "U": 10007, "V": 3001, "D": 100}]
SWEEP_CPU = [{"M": 37, "U": 11, "V": 7, "D": 20}, {"M": 20, "U": 40, "V": 5, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    U, V = dims["U"], dims["V"]
    u, v = (torch.randn(n, dims["D"], device=device, dtype=dtype) / dims["D"] ** 0.25 for n in (U, V))
    return u, v, *(torch.randint(0, n, (dims["M"],), device=device) for n in (U, V, V))


# ---- backward ----


@triton.jit
def bpr_backward_kernel(
    u_ptr, v_ptr, user_ptr, bought_ptr, sampled_ptr, c_ptr, dloss_ptr, du_ptr, dv_ptr, M, D,
    NEEDS_DU: tl.constexpr, NEEDS_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (i[:, None] < M) & (d[None, :] < D)
    a, p, n = load_index(user_ptr, i, M), load_index(bought_ptr, i, M), load_index(sampled_ptr, i, M)
    g = tl.load(dloss_ptr + i, mask=i < M, other=0.0) * tl.load(c_ptr + i, mask=i < M, other=0.0)
    if NEEDS_DU:
        du = g[:, None] * (gather(v_ptr, p, i < M, d, D) - gather(v_ptr, n, i < M, d, D))
        tl.atomic_add(du_ptr + a[:, None] * D + d[None, :], du, mask=mask, sem="relaxed")
    if NEEDS_DV:
        dv = g[:, None] * gather(u_ptr, a, i < M, d, D)
        tl.atomic_add(dv_ptr + p[:, None] * D + d[None, :], dv, mask=mask, sem="relaxed")
        tl.atomic_add(dv_ptr + n[:, None] * D + d[None, :], -dv, mask=mask, sem="relaxed")


class BPRLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, v, users, bought, sampled):
        saved = tuple(tensor.contiguous() for tensor in (u, v, users, bought, sampled))
        loss, c = bpr_forward(*saved)
        ctx.save_for_backward(*saved, c)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        u, v, users, bought, sampled, c = ctx.saved_tensors
        M, D = users.numel(), u.shape[1]
        needs_du, needs_dv = ctx.needs_input_grad[:2]
        du = torch.zeros_like(u, dtype=torch.float32) if needs_du else None
        dv = torch.zeros_like(v, dtype=torch.float32) if needs_dv else None
        grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(D, TILE["BLOCK_D"]))
        bpr_backward_kernel[grid](
            u, v, users, bought, sampled, c, dloss.contiguous(), du, dv, M, D,
            NEEDS_DU=needs_du, NEEDS_DV=needs_dv, **TILE,
        )  # fmt: skip
        du = du.to(u.dtype) if needs_du else None
        return du, dv.to(v.dtype) if needs_dv else None, None, None, None


def bpr_loss_autograd(u, v, users, bought, sampled):
    return BPRLoss.apply(u, v, users, bought, sampled)
