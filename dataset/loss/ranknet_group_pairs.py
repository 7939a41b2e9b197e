"""RankNet: within a group, every pair of items that differ in relevance is a question which one is better.

Forward    l = sum over pairs of a group with y_i > y_j of log(1 + exp(-(s_i - s_j))), one loss a group
Backward   with q_ij = sigmoid(-(s_i - s_j)) where y_i > y_j, else 0:  ds_i = dl sum_j (q_ji - q_ij);
           of q_ij and q_ji one is 0, so a pair has one number, which i and j take with opposite signs

Forward schedule: items of a group are cut in tiles, and a program owns (tile, group), walks all of the group
as partners and leaves one number; a second kernel adds a group's tiles. Pairs are made from two short
vectors.
Backward schedule: adding q_ij to i and j as a pair is met would send two atomics for each pair to a handful
of addresses. Instead the owner of a tile of items walks all partners and takes its own side of each pair:
every pair is made twice, which is one exp more, and every gradient is stored once. The sign is by comparison
of the relevances, so tiles on the diagonal and off it are one code; an item meets itself as a tie, and counts
for nothing.

op: ranknet_loss
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 64


@triton.jit
def load_items(s_ptr, y_ptr, i, L):
    """Scores and relevances of items i of this program's group."""
    first = tl.program_id(0).to(tl.int64) * L
    s = tl.load(s_ptr + first + i, mask=i < L, other=0.0).to(tl.float32)
    return s, tl.load(y_ptr + first + i, mask=i < L, other=0.0).to(tl.float32)


@triton.jit
def ranknet_kernel(s_ptr, y_ptr, part_ptr, L, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s_i, y_i = load_items(s_ptr, y_ptr, i, L)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s_j, y_j = load_items(s_ptr, y_ptr, j, L)
        better = (y_i[:, None] > y_j[None, :]) & (i[:, None] < L) & (j[None, :] < L)
        u = s_i[:, None] - s_j[None, :]
        cost = tl.where(u < 0, -u, 0.0) + tl.log(1 + tl.exp(tl.where(u < 0, u, -u)))
        total += tl.where(better, cost, 0.0)
    slot = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_ptr + slot, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def group_sum_kernel(part_ptr, loss_ptr, tiles, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + group * tiles + i, mask=i < tiles, other=0.0)
    tl.store(loss_ptr + group, tl.sum(total, axis=0))


@autodiff(inputs_require_grad=(0,))
def ranknet_loss(scores, relevance):
    """scores, relevance: (groups, L); gives (groups) in float32."""
    if scores.shape != relevance.shape:
        raise ValueError("scores and relevance must have one shape")
    groups, L = scores.shape
    tiles = triton.cdiv(L, BLOCK)
    part = torch.empty((groups, tiles), device=scores.device, dtype=torch.float32)
    loss = torch.empty(groups, device=scores.device, dtype=torch.float32)
    ranknet_kernel[(groups, tiles)](scores.contiguous(), relevance.contiguous(), part, L, BLOCK=BLOCK)
    group_sum_kernel[(groups,)](part, loss, tiles, BLOCK=32)
    return loss


def reference(scores, relevance):
    cost = torch.nn.functional.softplus(scores[:, None, :] - scores[:, :, None])
    return (cost * (relevance[:, :, None] > relevance[:, None, :])).sum((1, 2))


SWEEP = [{"groups": 1024, "L": 240}, {"groups": 61, "L": 1250}]
SWEEP_CPU = [{"groups": 5, "L": 21}, {"groups": 2, "L": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["groups"], dims["L"])
    relevance = torch.randint(0, 5, shape, device=device).to(dtype)
    return torch.randn(shape, device=device, dtype=dtype), relevance


# ---- backward ----


@triton.jit
def ranknet_backward_kernel(s_ptr, y_ptr, dloss_ptr, ds_ptr, L, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s_i, y_i = load_items(s_ptr, y_ptr, i, L)
    ds = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s_j, y_j = load_items(s_ptr, y_ptr, j, L)
        inside = (i[:, None] < L) & (j[None, :] < L)
        better = inside & (y_i[:, None] > y_j[None, :])
        worse = inside & (y_i[:, None] < y_j[None, :])
        u = s_i[:, None] - s_j[None, :]
        q = tl.sigmoid(tl.where(better, -u, u))
        ds += tl.where(better, -q, tl.where(worse, q, 0.0))
    grad = tl.sum(ds, axis=1) * tl.load(dloss_ptr + tl.program_id(0))
    place = tl.program_id(0).to(tl.int64) * L + i
    tl.store(ds_ptr + place, grad.to(ds_ptr.dtype.element_ty), mask=i < L)


class RankNetLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, relevance):
        scores, relevance = scores.contiguous(), relevance.contiguous()
        ctx.save_for_backward(scores, relevance)
        return ranknet_loss(scores, relevance)

    @staticmethod
    def backward(ctx, dloss):
        scores, relevance = ctx.saved_tensors
        groups, L = scores.shape
        ds = torch.empty_like(scores)
        ranknet_backward_kernel[(groups, triton.cdiv(L, BLOCK))](
            scores, relevance, dloss.contiguous(), ds, L, BLOCK=BLOCK
        )
        return ds, None


def ranknet_loss_autograd(scores, relevance):
    return RankNetLoss.apply(scores, relevance)
