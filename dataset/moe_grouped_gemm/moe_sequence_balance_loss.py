"""Balance loss of each sequence on its own, from sigmoid affinities that are made to sum to one.

Forward    p_te = sigmoid(z_te),  n_t = sum_e p_te,  s_te = p_te / n_t;   per sequence of T tokens:
           f_e = E / (K T) (how many of its K T choices are e),   L = sum_e f_e (1 / T) sum_t s_te
Backward   f is a count. With q_e = dL f_e / T:
           dp_te = (q_e - <q, s_t>) / n_t,   dz_te = dp_te p_te (1 - p_te)

Forward schedule: a program takes a group of tokens of one sequence with all experts in registers; it sums s
and the choices over the group into a slot. One program a sequence adds the slots, stores L and keeps f.
Backward schedule: tokens of a sequence are coupled through f alone, E numbers. The normaliser couples the
experts of a token, which its owner has in registers: rebuilt from z, one row sum <q, s> corrects the row, and
dz is stored once. Written out, dz = s (1 - p) (q - <q, s>): a softmax's backward, which sigmoids made to sum
to one keep but for the factor 1 - p. dL is read in the kernel, a number a sequence.

op: moe_sequence_balance
schedule: partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


GROUP = 64  # tokens of one slot
TILE = 16  # tokens at a time


@triton.jit
def affinities(z_ptr, rows, end, e, E):
    """p, n and s of a tile of tokens; 0, 1 and 0 outside."""
    mask = (rows < end)[:, None] & (e < E)[None, :]
    z = tl.load(z_ptr + rows[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
    p = tl.where(mask, tl.sigmoid(z), 0.0)
    n = tl.where(rows < end, tl.sum(p, axis=1), 1.0)
    return p, n, p / n[:, None]


@triton.jit
def slot_kernel(
    z_ptr, idx_ptr, slots_ptr, T, E, K, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr
):
    sequence, e = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_E)
    end = (sequence + 1) * T
    share = tl.zeros([BLOCK_E], dtype=tl.float32)
    count = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, GROUP, TILE):
        inside = tl.program_id(0) * GROUP + start + tl.arange(0, TILE)
        rows = tl.where(inside < T, sequence * T + inside, end)
        _, _, s = affinities(z_ptr, rows, end, e, E)
        share += tl.sum(s, axis=0)
        for k in range(K):
            idx = tl.load(idx_ptr + rows * K + k, mask=rows < end, other=-1)
            count += tl.sum(tl.where(idx[:, None] == e[None, :], 1.0, 0.0), axis=0)
    slot = (sequence * tl.num_programs(0) + tl.program_id(0)) * 2 * E
    tl.store(slots_ptr + slot + e, share, mask=e < E)
    tl.store(slots_ptr + slot + E + e, count, mask=e < E)


@triton.jit
def loss_kernel(slots_ptr, loss_ptr, f_ptr, groups, T, E, K, BLOCK_E: tl.constexpr):
    sequence, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E)
    share = tl.zeros([BLOCK_E], dtype=tl.float32)
    count = tl.zeros([BLOCK_E], dtype=tl.float32)
    for g in range(groups):
        slot = (sequence * groups + g) * 2 * E
        share += tl.load(slots_ptr + slot + e, mask=e < E, other=0.0)
        count += tl.load(slots_ptr + slot + E + e, mask=e < E, other=0.0)
    f = count * (E / (K * T))
    tl.store(f_ptr + sequence * E + e, f, mask=e < E)
    tl.store(loss_ptr + sequence, tl.sum(f * share, axis=0) / T)


def balance_forward(z, idx):
    (B, T, E), K = z.shape, idx.shape[2]
    if idx.shape[:2] != (B, T):
        raise ValueError("idx must have the choices of each token of z")
    if E > 1024:
        raise ValueError(f"{E} experts do not fit one tile")
    groups, BLOCK_E = triton.cdiv(T, GROUP), triton.next_power_of_2(E)
    slots = torch.empty((B, groups, 2, E), device=z.device, dtype=torch.float32)
    loss, f = slots.new_empty(B), slots.new_empty((B, E))
    slot_kernel[(groups, B)](z, idx, slots, T, E, K, GROUP=GROUP, TILE=TILE, BLOCK_E=BLOCK_E)
    loss_kernel[(B,)](slots, loss, f, groups, T, E, K, BLOCK_E=BLOCK_E)
    return loss, f


@autodiff(inputs_require_grad=(0,))
def sequence_balance(z, idx):
    """z: (B, T, E), affinities before the sigmoid; idx: int64 (B, T, K), the choices. Gives float32 (B)."""
    return balance_forward(z.contiguous(), idx.contiguous())[0]


def reference(z, idx):
    (_, T, E), K = z.shape, idx.shape[2]
    p = torch.sigmoid(z.to(torch.promote_types(z.dtype, torch.float32)))
    s = p / p.sum(-1, keepdim=True)
    f = torch.nn.functional.one_hot(idx, E).sum((1, 2)).to(s.dtype) * (E / (K * T))
    return (f * s.mean(1)).sum(1)


SWEEP = [{"B": 8, "T": 4096, "E": 256, "K": 8}, {"B": 3, "T": 2039, "E": 60, "K": 6}]
SWEEP_CPU = [{"B": 2, "T": 70, "E": 11, "K": 3}, {"B": 3, "T": 17, "E": 16, "K": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, E, K = (dims[name] for name in ("B", "T", "E", "K"))
    z = torch.randn(B, T, E, device=device, dtype=dtype)
    return z, torch.randint(0, E, (B, T, K), device=device)


# ---- backward ----


@triton.jit
def balance_backward_kernel(z_ptr, f_ptr, dloss_ptr, dz_ptr, T, E, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    sequence, e = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_E)
    inside = tl.program_id(0) * TILE + tl.arange(0, TILE)
    end = (sequence + 1) * T
    rows = tl.where(inside < T, sequence * T + inside, end)
    p, n, s = affinities(z_ptr, rows, end, e, E)
    q = tl.load(f_ptr + sequence * E + e, mask=e < E, other=0.0) * (tl.load(dloss_ptr + sequence) / T)
    dp = (q[None, :] - tl.sum(q[None, :] * s, axis=1)[:, None]) / n[:, None]
    mask = (rows < end)[:, None] & (e < E)[None, :]
    dz = dp * p * (1 - p)
    tl.store(dz_ptr + rows[:, None] * E + e[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)


class SequenceBalance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, idx):
        z = z.contiguous()
        loss, f = balance_forward(z, idx.contiguous())
        ctx.save_for_backward(z, f)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        z, f = ctx.saved_tensors
        B, T, E = z.shape
        dz = torch.empty_like(z)
        balance_backward_kernel[(triton.cdiv(T, TILE), B)](
            z, f, dloss.contiguous(), dz, T, E, TILE=TILE, BLOCK_E=triton.next_power_of_2(E)
        )
        return dz, None


def sequence_balance_autograd(z, idx):
    return SequenceBalance.apply(z, idx)
