"""Triplet margin loss with anchor swap: the negative counts from the nearer of anchor and positive.

Forward    d(u, v) = (|u - v|^2 + e)^(1/2);  for each triple  l = max(0, d_ap - min(d_an, d_pn) + m)
Backward   g = dl where l > 0, else 0;  ap = g (a - p) / d_ap;  and, where d_an <= d_pn, an = g (a - n) / d_an
           and pn = 0, else an = 0 and pn = g (p - n) / d_pn:
           da = ap - an,  dp = -ap - pn,  dn = an + pn

Forward schedule: an embedding is short, so a program owns several triples and walks the width in tiles of
rows by columns; the three distances are saved.
Backward schedule: the same tiles, now a grid in both directions: which terms count, and all divisors, are
three numbers of a row, so columns are independent. Each program reads the three inputs once and writes three
gradients; turning the choice into two coefficients of a row, one of them 0, leaves the lanes without a
branch. Triples that are settled, l = 0, are most of them after a while: they load nothing and store zeros. e
keeps the divisors from 0 where two embeddings agree.

op: triplet_loss
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, counts, d, D):
    mask = counts[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def triplet_kernel(
    a_ptr, p_ptr, n_ptr, loss_ptr, ap_ptr, an_ptr, pn_ptr, M, D, margin, eps,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ap = tl.zeros([BLOCK_M], dtype=tl.float32)
    an = tl.zeros([BLOCK_M], dtype=tl.float32)
    pn = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        a = load_tile(a_ptr, rows, rows < M, d, D)
        p = load_tile(p_ptr, rows, rows < M, d, D)
        n = load_tile(n_ptr, rows, rows < M, d, D)
        ap += tl.sum((a - p) * (a - p), axis=1)
        an += tl.sum((a - n) * (a - n), axis=1)
        pn += tl.sum((p - n) * (p - n), axis=1)
    ap = tl.sqrt(ap + eps)
    an = tl.sqrt(an + eps)
    pn = tl.sqrt(pn + eps)
    loss = ap - tl.where(an <= pn, an, pn) + margin
    tl.store(ap_ptr + rows, ap, mask=rows < M)
    tl.store(an_ptr + rows, an, mask=rows < M)
    tl.store(pn_ptr + rows, pn, mask=rows < M)
    tl.store(loss_ptr + rows, tl.where(loss > 0, loss, 0.0), mask=rows < M)


def triplet_forward(a, p, n, margin, eps):
    if not a.shape == p.shape == n.shape:
        raise ValueError("a, p and n must have one shape")
    M, D = a.shape
    loss, ap, an, pn = (torch.empty(M, device=a.device, dtype=torch.float32) for _ in range(4))
    triplet_kernel[(triton.cdiv(M, 16),)](
        a, p, n, loss, ap, an, pn, M, D, margin, eps, BLOCK_M=16, BLOCK_D=128
    )
    return loss, ap, an, pn


@autodiff(inputs_require_grad=(0, 1, 2))
def triplet_loss(a, p, n, margin=1.0, eps=1e-6):
    """a, p, n: (M, D), anchors, positives and negatives; gives (M) in float32."""
    return triplet_forward(a.contiguous(), p.contiguous(), n.contiguous(), margin, eps)[0]


def reference(a, p, n, margin=1.0, eps=1e-6):
    ap, an, pn = (torch.sqrt((u - v).pow(2).sum(-1) + eps) for u, v in ((a, p), (a, n), (p, n)))
    loss = ap - torch.where(an <= pn, an, pn) + margin
    return torch.where(loss > 0, loss, 0.0)


SWEEP = [{"M": 65536, "D": 768}, {"M": 100003, "D": 129}]
SWEEP_CPU = [{"M": 29, "D": 37}, {"M": 18, "D": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["M"], dims["D"])
    a, p, n = (torch.randn(shape, device=device) / dims["D"] ** 0.5 for _ in range(3))
    return a.to(dtype), (0.7 * a + p).to(dtype), (0.3 * a + n).to(dtype), 0.2


# ---- backward ----


@triton.jit
def triplet_backward_kernel(
    a_ptr, p_ptr, n_ptr, loss_ptr, ap_ptr, an_ptr, pn_ptr, dloss_ptr, da_ptr, dp_ptr, dn_ptr, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    counts = tl.load(loss_ptr + rows, mask=rows < M, other=0.0) > 0
    g = tl.where(counts, tl.load(dloss_ptr + rows, mask=rows < M, other=0.0), 0.0)
    d_ap = tl.load(ap_ptr + rows, mask=rows < M, other=1.0)
    d_an = tl.load(an_ptr + rows, mask=rows < M, other=1.0)
    d_pn = tl.load(pn_ptr + rows, mask=rows < M, other=1.0)
    of_a = tl.where(d_an <= d_pn, g / d_an, 0.0)
    of_p = tl.where(d_an <= d_pn, 0.0, g / d_pn)
    a = load_tile(a_ptr, rows, counts, d, D)
    p = load_tile(p_ptr, rows, counts, d, D)
    n = load_tile(n_ptr, rows, counts, d, D)
    ap = (g / d_ap)[:, None] * (a - p)
    an = of_a[:, None] * (a - n)
    pn = of_p[:, None] * (p - n)
    mask = (rows[:, None] < M) & (d[None, :] < D)
    offs = rows[:, None] * D + d[None, :]
    tl.store(da_ptr + offs, (ap - an).to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(dp_ptr + offs, (-ap - pn).to(dp_ptr.dtype.element_ty), mask=mask)
    tl.store(dn_ptr + offs, (an + pn).to(dn_ptr.dtype.element_ty), mask=mask)


class TripletLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, p, n, margin, eps):
        a, p, n = a.contiguous(), p.contiguous(), n.contiguous()
        loss, ap, an, pn = triplet_forward(a, p, n, margin, eps)
        ctx.save_for_backward(a, p, n, loss, ap, an, pn)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        a, p, n, *rows = ctx.saved_tensors
        M, D = a.shape
        grads = tuple(torch.empty_like(tensor) for tensor in (a, p, n))
        triplet_backward_kernel[(triton.cdiv(M, 16), triton.cdiv(D, 128))](
            a, p, n, *rows, dloss.contiguous(), *grads, M, D, BLOCK_M=16, BLOCK_D=128
        )
        needs = zip(grads, ctx.needs_input_grad[:3], strict=True)
        return *(grad if needed else None for grad, needed in needs), None, None


def triplet_loss_autograd(a, p, n, margin=1.0, eps=1e-6):
    return TripletLoss.apply(a, p, n, margin, eps)
