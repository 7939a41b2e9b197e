"""Supervised contrastive loss: every sample of the same label is a positive.

Forward    s_ij = <x_i, x_j> / T,  lse_i = log sum_{j != i} exp(s_ij),
           P_i the number of j != i with i's label;
           l_i = lse_i - (1 / P_i) sum over those j of s_ij,  and 0 where P_i = 0
Backward   dl_i/ds_ij = exp(s_ij - lse_i) - [same label] / P_i =: h_ij for j != i, h_ii = 0, and s_ij stands
           for s_ji too:  dx_i = (1 / T) sum_j (dl_i h_ij + dl_j h_ji) x_j,  with dl_i = 0 where P_i = 0

Forward schedule: a program owns a tile of rows, walks all samples, and keeps an online softmax, the sum of
the positives' scores and their number. The maximum m, the sum of exp(s_ij - m_i) and P are saved, and lse is
not: beside large scores it forgets the sum, and where all rows are alike nothing but such errors would be in
a gradient that cancels. Scores and masks are never stored.
Backward schedule: x plays both sides, so a sample gets gradient as the anchor of its row and as a member of
every other row. Both need the one number s_ij, since s is symmetric: the owner of rows i rebuilds a tile of
scores once, makes h_ij from its own softmax and h_ji from m, sum, P and dl of the columns, and adds them
before the product with x_j. One kernel and one rebuild give the whole gradient; taking the two roles apart
would rebuild everything twice or add by atomics. A program owns a chunk of columns of x too, so that D may be
any.

op: supcon_loss
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def scores(x_ptr, rows, cols, M, D, temperature, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        own = load_tile(x_ptr, rows, d, M, D)
        s = tl.dot(own, tl.trans(load_tile(x_ptr, cols, d, M, D)), s, input_precision=PRECISION)
    return s / temperature


@triton.jit
def supcon_kernel(
    x_ptr, label_ptr, loss_ptr, m_ptr, total_ptr, positives_ptr, M, D, temperature,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + rows, mask=rows < M, other=0)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a sample may be alone
    total = tl.zeros([BLOCK], dtype=tl.float32)
    score = tl.zeros([BLOCK], dtype=tl.float32)
    positives = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = scores(x_ptr, rows, cols, M, D, temperature, PRECISION, BLOCK)
        other = tl.load(label_ptr + cols, mask=cols < M, other=0)
        counts = (rows[:, None] != cols[None, :]) & (cols[None, :] < M)
        same = counts & (label[:, None] == other[None, :])
        score += tl.sum(tl.where(same, s, 0.0), axis=1)
        positives += tl.sum(tl.where(same, 1.0, 0.0), axis=1)
        m_new = tl.maximum(m, tl.max(tl.where(counts, s, -1e30), axis=1))
        e = tl.where(counts, tl.exp(s - m_new[:, None]), 0.0)
        total = total * tl.exp(m - m_new) + tl.sum(e, axis=1)
        m = m_new
    total = tl.maximum(total, 1e-30)
    loss = tl.where(positives > 0, m + tl.log(total) - score / tl.maximum(positives, 1.0), 0.0)
    tl.store(m_ptr + rows, m, mask=rows < M)
    tl.store(total_ptr + rows, total, mask=rows < M)
    tl.store(positives_ptr + rows, positives, mask=rows < M)
    tl.store(loss_ptr + rows, loss, mask=rows < M)


def supcon_forward(x, labels, temperature):
    M, D = x.shape
    loss, m, total, positives = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(4))
    tiles = tiles_of(x)
    grid = (triton.cdiv(M, tiles["BLOCK"]),)
    supcon_kernel[grid](x, labels, loss, m, total, positives, M, D, temperature, **tiles)
    return loss, m, total, positives


@autodiff(inputs_require_grad=(0,))
def supcon_loss(x, labels, temperature=0.1):
    """x: (M, D), rows of about unit length; labels: int64 (M); gives (M) in float32."""
    return supcon_forward(x.contiguous(), labels.contiguous(), temperature)[0]


def reference(x, labels, temperature=0.1):
    other = ~torch.eye(x.shape[0], device=x.device, dtype=torch.bool)
    same = other & (labels[:, None] == labels)
    s = x @ x.t() / temperature
    lse = s.masked_fill(~other, -1e30).logsumexp(1)
    positives = same.sum(1)
    return torch.where(positives > 0, lse - (s * same).sum(1) / positives.clamp(min=1), 0.0)


SWEEP = [{"M": 4096, "D": 128}, {"M": 2047, "D": 500}]
SWEEP_CPU = [{"M": 38, "D": 33}, {"M": 70, "D": 80}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M = dims["M"]
    x = torch.randn(M, dims["D"], device=device, dtype=dtype) / dims["D"] ** 0.5
    return x, torch.randint(0, M // 4 + 1, (M,), device=device), 0.2


# ---- backward ----


@triton.jit
def supcon_backward_kernel(
    x_ptr, label_ptr, m_ptr, total_ptr, positives_ptr, dloss_ptr, dx_ptr, M, D, temperature,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    label = tl.load(label_ptr + rows, mask=rows < M, other=0)
    m = tl.load(m_ptr + rows, mask=rows < M, other=0.0)
    total = tl.load(total_ptr + rows, mask=rows < M, other=1.0)
    P = tl.load(positives_ptr + rows, mask=rows < M, other=0.0)
    dl = tl.where(P > 0, tl.load(dloss_ptr + rows, mask=rows < M, other=0.0), 0.0)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = scores(x_ptr, rows, cols, M, D, temperature, PRECISION, BLOCK)
        other_label = tl.load(label_ptr + cols, mask=cols < M, other=0)
        other_m = tl.load(m_ptr + cols, mask=cols < M, other=0.0)
        other_total = tl.load(total_ptr + cols, mask=cols < M, other=1.0)
        other_P = tl.load(positives_ptr + cols, mask=cols < M, other=0.0)
        other_dl = tl.where(other_P > 0, tl.load(dloss_ptr + cols, mask=cols < M, other=0.0), 0.0)
        counts = (rows[:, None] != cols[None, :]) & (rows[:, None] < M) & (cols[None, :] < M)
        shares = dl / tl.maximum(P, 1.0)
        other_shares = other_dl / tl.maximum(other_P, 1.0)
        pull = tl.where(label[:, None] == other_label[None, :], shares[:, None] + other_shares[None, :], 0.0)
        push = (dl / total)[:, None] * tl.exp(tl.where(counts, s - m[:, None], 0.0))
        push += (other_dl / other_total)[None, :] * tl.exp(tl.where(counts, s - other_m[None, :], 0.0))
        h = tl.where(counts, push - pull, 0.0)
        x = load_tile(x_ptr, cols, chunk, M, D)
        dx = tl.dot(h.to(x.dtype), x, dx, input_precision=PRECISION)
    mask = (rows[:, None] < M) & (chunk[None, :] < D)
    offs = rows[:, None].to(tl.int64) * D + chunk[None, :]
    tl.store(dx_ptr + offs, (dx / temperature).to(dx_ptr.dtype.element_ty), mask=mask)


class SupConLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, labels, temperature):
        x, labels = x.contiguous(), labels.contiguous()
        loss, m, total, positives = supcon_forward(x, labels, temperature)
        ctx.save_for_backward(x, labels, m, total, positives)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, labels, m, total, positives = ctx.saved_tensors
        M, D = x.shape
        tiles = {**tiles_of(x), "BLOCK_D": 64 if x.dtype == torch.float32 else 128}
        dx = torch.empty_like(x)
        grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK_D"]))
        supcon_backward_kernel[grid](
            x, labels, m, total, positives, dloss.contiguous(), dx, M, D, ctx.temperature, **tiles
        )
        return dx, None, None


def supcon_loss_autograd(x, labels, temperature=0.1):
    return SupConLoss.apply(x, labels, temperature)
