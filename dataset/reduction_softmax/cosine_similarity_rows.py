"""Cosine similarity of two tensors, row by row.

Forward    c = <a, b> p q,  p = 1 / max(|a|, e),  q = 1 / max(|b|, e)
Backward   da = dc p q b - dc c p^2 a,  db = dc p q a - dc c q^2 b;  the second term is absent where the norm
           is held by e.  Derivation: dp/da = -p^3 a where |a| > e, and <a, b> q p^3 = c p^2

Forward schedule: a program owns a row and sums <a, b>, <a, a> and <b, b> in one walk. It saves c, p and q.
Backward schedule: a row's gradient is a sum of a and b with two factors, and these are known from the three
saved numbers: no row is walked again, no sum is made. The grid is (row, column tile); one read of a and b
serves both gradients. Few long rows thus fill a device as many short ones do.

op: cosine_similarity
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
def cosine_kernel(a_ptr, b_ptr, c_ptr, p_ptr, q_ptr, N, least, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ab = tl.zeros([BLOCK], dtype=tl.float32)
    aa = tl.zeros([BLOCK], dtype=tl.float32)
    bb = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        ab += a * b
        aa += a * a
        bb += b * b
    p = 1 / tl.maximum(tl.sqrt(tl.sum(aa, axis=0)), least)
    q = 1 / tl.maximum(tl.sqrt(tl.sum(bb, axis=0)), least)
    tl.store(c_ptr + row, tl.sum(ab, axis=0) * p * q)
    tl.store(p_ptr + row, p)
    tl.store(q_ptr + row, q)


def cosine_forward(a, b, least):
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    N = a.shape[-1]
    c, p, q = (torch.empty(a.shape[:-1], device=a.device, dtype=torch.float32) for _ in range(3))
    BLOCK = min(1024, triton.next_power_of_2(N))
    cosine_kernel[(c.numel(),)](a, b, c, p, q, N, least, BLOCK=BLOCK)
    return c, p, q


@autodiff(inputs_require_grad=(0, 1))
def cosine_similarity(a, b, least=1e-6):
    """a, b: (..., N); gives (...) in float32; a shorter norm than `least` counts as `least`."""
    return cosine_forward(a.contiguous(), b.contiguous(), least)[0]


def reference(a, b, least=1e-6):
    p, q = (1 / torch.linalg.vector_norm(t, dim=-1).clamp(min=least) for t in (a, b))
    return (a * b).sum(-1) * p * q


SWEEP = [{"M": 32768, "N": 768}, {"M": 8191, "N": 4097}]
SWEEP_CPU = [{"M": 33, "N": 72}, {"M": 4, "N": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return a, 0.5 * a + torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def cosine_backward_kernel(
    a_ptr, b_ptr, c_ptr, p_ptr, q_ptr, dc_ptr, da_ptr, db_ptr, N, least, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    a = tl.load(a_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row)
    p = tl.load(p_ptr + row)
    q = tl.load(q_ptr + row)
    dc = tl.load(dc_ptr + row).to(tl.float32)
    along_a = tl.where(p * least < 1, c * p * p, 0.0)
    along_b = tl.where(q * least < 1, c * q * q, 0.0)
    da = dc * (p * q * b - along_a * a)
    db = dc * (p * q * a - along_b * b)
    tl.store(da_ptr + row * N + cols, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + row * N + cols, db.to(db_ptr.dtype.element_ty), mask=mask)


class CosineSimilarity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, least):
        a, b = a.contiguous(), b.contiguous()
        c, p, q = cosine_forward(a, b, least)
        ctx.save_for_backward(a, b, c, p, q)
        ctx.least = least
        return c

    @staticmethod
    def backward(ctx, dc):
        a, b, c, p, q = ctx.saved_tensors
        N = a.shape[-1]
        da, db = torch.empty_like(a), torch.empty_like(b)
        BLOCK = min(1024, triton.next_power_of_2(N))
        cosine_backward_kernel[(c.numel(), triton.cdiv(N, BLOCK))](
            a, b, c, p, q, dc.contiguous(), da, db, N, ctx.least, BLOCK=BLOCK
        )
        needs = ctx.needs_input_grad
        return da if needs[0] else None, db if needs[1] else None, None


def cosine_similarity_autograd(a, b, least=1e-6):
    return CosineSimilarity.apply(a, b, least)
