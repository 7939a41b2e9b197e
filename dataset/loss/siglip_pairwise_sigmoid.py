"""Sigmoid loss of paired embeddings: each of the M x M pairs is a yes-or-no question of its own.

Forward    q_ij = <a_i, b_j>,  z = s q + c,  y_ij = 1 on the diagonal and -1 elsewhere,
           l = (1 / M) sum_ij log(1 + exp(-y_ij z_ij))
Backward   h_ij = M dl/dz_ij = -y_ij sigmoid(-y_ij z_ij);  with g = dl / M:
           dA = g s H B,  dB = g s H^T A,  ds = g sum_ij h_ij q_ij,  dc = g sum_ij h_ij

Forward schedule: a grid of (row tile, column tile); no row or column has a normaliser, so a tile is done when
its dots are. It leaves its part of l, and of the sums in ds and dc too: they need only what it holds, and the
loss is one number, so dl can wait. One program adds the parts of all three.
Backward schedule: ds and dc are one product each. H is as large as the logits and is rebuilt, not stored.
It is symmetric in the roles of A and B, so one kernel serves both: a program owns (row tile, chunk of
columns) of dA, walks the rows of B, makes each tile of H from dots over all of D, and multiplies it with its
chunk of B in registers; launched with A and B exchanged it makes dB. Each gradient has one owner, without
atomics, and one rebuild serves a whole chunk, which is as wide as registers allow.

op: siglip_loss
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(a):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if a.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_K": BLOCK}


@triton.jit
def load_tile(ptr, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def dots(a_ptr, b_ptr, rows, cols, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    q = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        a = load_tile(a_ptr, rows, d, M, D)
        b = load_tile(b_ptr, cols, d, M, D)
        q = tl.dot(a, tl.trans(b), q, input_precision=PRECISION)
    return q


@triton.jit
def pair_kernel(
    a_ptr, b_ptr, s_ptr, c_ptr, part_ptr, M, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = dots(a_ptr, b_ptr, rows, cols, M, D, PRECISION, BLOCK, BLOCK_K)
    z = tl.load(s_ptr).to(tl.float32) * q + tl.load(c_ptr).to(tl.float32)
    y = tl.where(rows[:, None] == cols[None, :], 1.0, -1.0)
    inside = (rows[:, None] < M) & (cols[None, :] < M)
    u = y * z
    loss = tl.where(u < 0, -u, 0.0) + tl.log(1 + tl.exp(tl.where(u < 0, u, -u)))  # smooth at 0 too
    loss = tl.where(inside, loss, 0.0)
    h = tl.where(inside, -y * tl.sigmoid(-u), 0.0)
    part = part_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(part, tl.sum(tl.sum(loss, axis=1), axis=0))
    tl.store(part + 1, tl.sum(tl.sum(h * q, axis=1), axis=0))
    tl.store(part + 2, tl.sum(tl.sum(h, axis=1), axis=0))


@triton.jit
def mean_kernel(part_ptr, out_ptr, parts, M, BLOCK: tl.constexpr):
    which = tl.program_id(0)  # the loss, ds or dc
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i * 3 + which, mask=i < parts, other=0.0)
    tl.store(out_ptr + which, tl.sum(total, axis=0) / tl.maximum(M, 1))


def siglip_forward(a, b, s, c):
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    M, D = a.shape
    tiles = tiles_of(a)
    side = triton.cdiv(M, tiles["BLOCK"])
    part = torch.empty((side * side, 3), device=a.device, dtype=torch.float32)
    means = torch.empty(3, device=a.device, dtype=torch.float32)
    pair_kernel[(side, side)](a, b, s, c, part, M, D, **tiles)
    mean_kernel[(3,)](part, means, side * side, M, BLOCK=1024)
    return means


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def siglip_loss(a, b, s, c):
    """a, b: (M, D), row i of a paired with row i of b; s, c: one number each. Gives one float32 number."""
    return siglip_forward(a.contiguous(), b.contiguous(), s, c)[0]


def reference(a, b, s, c):
    z = s * a @ b.t() + c
    y = 2 * torch.eye(a.shape[0], device=a.device, dtype=a.dtype) - 1
    return torch.nn.functional.softplus(-y * z).sum() / max(1, a.shape[0])


SWEEP = [{"M": 4096, "D": 768}, {"M": 2047, "D": 500}]
SWEEP_CPU = [{"M": 38, "D": 33}, {"M": 70, "D": 80}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D = dims["M"], dims["D"]
    a, b = (torch.randn(M, D, device=device, dtype=dtype) / D**0.5 for _ in range(2))
    s, c = (torch.tensor(value, device=device, dtype=dtype) for value in (10.0, -2.0))
    return a, b, s, c


# ---- backward ----


@triton.jit
def owner_kernel(
    own_ptr, other_ptr, s_ptr, c_ptr, dloss_ptr, down_ptr, M, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.load(s_ptr).to(tl.float32)
    c = tl.load(c_ptr).to(tl.float32)
    down = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = s * dots(own_ptr, other_ptr, rows, cols, M, D, PRECISION, BLOCK, BLOCK_K) + c
        y = tl.where(rows[:, None] == cols[None, :], 1.0, -1.0)
        h = tl.where(cols[None, :] < M, -y * tl.sigmoid(-y * z), 0.0)
        other = load_tile(other_ptr, cols, chunk, M, D)
        down = tl.dot(h.to(other.dtype), other, down, input_precision=PRECISION)
    down *= tl.load(dloss_ptr).to(tl.float32) * s / M
    offs = rows[:, None].to(tl.int64) * D + chunk[None, :]
    mask = (rows[:, None] < M) & (chunk[None, :] < D)
    tl.store(down_ptr + offs, down.to(down_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scalar_kernel(means_ptr, dloss_ptr, ds_ptr, dc_ptr):
    dloss = tl.load(dloss_ptr).to(tl.float32)
    tl.store(ds_ptr, (dloss * tl.load(means_ptr + 1)).to(ds_ptr.dtype.element_ty))
    tl.store(dc_ptr, (dloss * tl.load(means_ptr + 2)).to(dc_ptr.dtype.element_ty))


class SigLIPLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, s, c):
        a, b = a.contiguous(), b.contiguous()
        means = siglip_forward(a, b, s, c)
        ctx.save_for_backward(a, b, s, c, means)
        return means[0].clone()

    @staticmethod
    def backward(ctx, dloss):
        a, b, s, c, means = ctx.saved_tensors
        M, D = a.shape
        tiles = {**tiles_of(a), "BLOCK_D": 64 if a.dtype == torch.float32 else 128}
        grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK_D"]))
        needs = ctx.needs_input_grad
        da = db = None
        if needs[0]:
            da = torch.empty_like(a)
            owner_kernel[grid](a, b, s, c, dloss, da, M, D, **tiles)
        if needs[1]:
            db = torch.empty_like(b)
            owner_kernel[grid](b, a, s, c, dloss, db, M, D, **tiles)
        ds, dc = torch.empty_like(s), torch.empty_like(c)
        if needs[2] or needs[3]:
            scalar_kernel[(1,)](means, dloss, ds, dc)
        return da, db, ds if needs[2] else None, dc if needs[3] else None


def siglip_loss_autograd(a, b, s, c):
    return SigLIPLoss.apply(a, b, s, c)
