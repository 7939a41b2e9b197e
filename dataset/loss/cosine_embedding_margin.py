"""Cosine embedding loss: pairs that belong together are turned towards each other, others apart.

Forward    s = <a, b>,  p = (|a|^2 + eps)^(-1/2),  q = (|b|^2 + eps)^(-1/2),  c = s p q;
           l = 1 - c where t > 0,   max(c - m, 0) elsewhere
Backward   k = dl/dc: -1 where t > 0, elsewhere 1 if c > m, else 0.  With dp/da = -p^3 a:
           da = dl k (p q b - c p^2 a),   db = dl k (p q a - c q^2 b)

Forward schedule: a program owns a few pairs and walks the features once, with three sums; c, p and q are
saved.
Backward schedule: the saved numbers are all the reductions there are, so the rest is pointwise, tiles of
(pairs, features) without an order: a grid with both axes, where an owner of whole pairs would be few programs
for a batch of long vectors. A pair that is far enough apart has k = 0: its rows are not even read, and most
of a trained model's pairs are such.

op: cosine_embedding
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def cosine_kernel(
    a_ptr, b_ptr, t_ptr, loss_ptr, c_ptr, p_ptr, q_ptr, M, D, margin, eps,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    a_square = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_square = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (rows[:, None] < M) & (d[None, :] < D)
        offs = rows[:, None].to(tl.int64) * D + d[None, :]
        a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        s += a * b
        a_square += a * a
        b_square += b * b
    p = tl.rsqrt(tl.sum(a_square, axis=1) + eps)
    q = tl.rsqrt(tl.sum(b_square, axis=1) + eps)
    c = tl.sum(s, axis=1) * p * q
    t = tl.load(t_ptr + rows, mask=rows < M, other=1)
    loss = tl.where(t > 0, 1 - c, tl.where(c > margin, c - margin, 0.0))
    tl.store(loss_ptr + rows, loss, mask=rows < M)
    tl.store(c_ptr + rows, c, mask=rows < M)
    tl.store(p_ptr + rows, p, mask=rows < M)
    tl.store(q_ptr + rows, q, mask=rows < M)


def cosine_forward(a, b, t, margin, eps):
    if a.shape != b.shape or t.shape != a.shape[:1]:
        raise ValueError("need a and b (M, D), t (M)")
    (M, D), grid = a.shape, (triton.cdiv(a.shape[0], 8),)
    loss, c, p, q = (torch.empty(M, device=a.device, dtype=torch.float32) for _ in range(4))
    cosine_kernel[grid](a, b, t, loss, c, p, q, M, D, margin, eps, BLOCK_M=8, BLOCK_D=128)
    return loss, c, p, q


@autodiff(inputs_require_grad=(0, 1))
def cosine_embedding_loss(a, b, t, margin=0.2, eps=1e-8):
    """a, b: (M, D); t: int (M), above 0 for pairs that belong together; gives (M), float32."""
    return cosine_forward(a.contiguous(), b.contiguous(), t.contiguous(), margin, eps)[0]


def reference(a, b, t, margin=0.2, eps=1e-8):
    lengths = torch.rsqrt(a.pow(2).sum(1) + eps) * torch.rsqrt(b.pow(2).sum(1) + eps)
    c = (a * b).sum(1) * lengths
    return torch.where(t > 0, 1 - c, torch.relu(c - margin))


SWEEP = [{"M": 65536, "D": 768}, {"M": 10007, "D": 1000}]
SWEEP_CPU = [{"M": 33, "D": 50}, {"M": 9, "D": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    b = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype) + 0.3 * a
    return a, b, torch.randint(0, 2, (dims["M"],), device=device)


# ---- backward ----


@triton.jit
def cosine_backward_kernel(
    a_ptr, b_ptr, t_ptr, c_ptr, p_ptr, q_ptr, dl_ptr, da_ptr, db_ptr, M, D, margin,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(t_ptr + rows, mask=rows < M, other=0)
    c = tl.load(c_ptr + rows, mask=rows < M, other=0.0)
    p = tl.load(p_ptr + rows, mask=rows < M, other=0.0)[:, None]
    q = tl.load(q_ptr + rows, mask=rows < M, other=0.0)[:, None]
    dl = tl.load(dl_ptr + rows, mask=rows < M, other=0.0)
    k = tl.where(t > 0, -1.0, tl.where(c > margin, 1.0, 0.0))
    dc = (dl * k)[:, None]
    mask = (rows[:, None] < M) & (d[None, :] < D)
    offs = rows[:, None].to(tl.int64) * D + d[None, :]
    read = mask & (k[:, None] != 0)
    a = tl.load(a_ptr + offs, mask=read, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=read, other=0.0).to(tl.float32)
    da = dc * p * (q * b - c[:, None] * p * a)
    db = dc * q * (p * a - c[:, None] * q * b)
    tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + offs, db.to(db_ptr.dtype.element_ty), mask=mask)


class CosineEmbeddingLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, t, margin, eps):
        a, b, t = a.contiguous(), b.contiguous(), t.contiguous()
        loss, c, p, q = cosine_forward(a, b, t, margin, eps)
        ctx.save_for_backward(a, b, t, c, p, q)
        ctx.margin = margin
        return loss

    @staticmethod
    def backward(ctx, dl):
        a, b, t, c, p, q = ctx.saved_tensors
        M, D = a.shape
        da, db = torch.empty_like(a), torch.empty_like(b)
        grid = (triton.cdiv(M, 8), triton.cdiv(D, 128))
        cosine_backward_kernel[grid](
            a, b, t, c, p, q, dl.contiguous(), da, db, M, D, ctx.margin, BLOCK_M=8, BLOCK_D=128
        )
        needs = ctx.needs_input_grad
        return da if needs[0] else None, db if needs[1] else None, None, None, None


def cosine_embedding_loss_autograd(a, b, t, margin=0.2, eps=1e-8):
    return CosineEmbeddingLoss.apply(a, b, t, margin, eps)
