"""Compositional embedding: quotient row times remainder row, two small tables in place of a large one.

Forward    y_t = wq[i_t // m] * wr[i_t % m]
Backward   dwq[i_t // m] += dy_t * wr[i_t % m],   dwr[i_t % m] += dy_t * wq[i_t // m], over all tokens t

Forward schedule: a program owns (token, column tile) and gathers two rows.
Backward schedule: the tokens that share a quotient and those that share a remainder are two unrelated
groupings, so a sorted gather would need two orders and two walks over dy. The forward's owner has everything
instead: it reads dy_t once, gathers the two rows again (neither they nor y were saved) and adds each product
to the other table's row by atomics, in fp32 buffers that are zeroed first. With V rows spread over V / m and
m of them, a row gets N m / V or N / m contributions, few enough at a time for atomics.

op: qr_embedding
schedule: atomic_accumulate
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def qr_embedding_kernel(wq_ptr, wr_ptr, idx_ptr, y_ptr, m, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(idx_ptr + t)
    q = tl.load(wq_ptr + i // m * D + d, mask=d < D, other=0.0).to(tl.float32)
    r = tl.load(wr_ptr + i % m * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * D + d, (q * r).to(y_ptr.dtype.element_ty), mask=d < D)


@autodiff(inputs_require_grad=(0, 1))
def qr_embedding(wq, wr, idx):
    """wq: (quotients, D); wr: (m, D); idx: int64, any shape, from 0 to quotients * m - 1."""
    wq, wr, idx = wq.contiguous(), wr.contiguous(), idx.contiguous()
    m, D = wr.shape
    y = torch.empty((*idx.shape, D), device=wq.device, dtype=wq.dtype)
    qr_embedding_kernel[(idx.numel(), triton.cdiv(D, 128))](wq, wr, idx, y, m, D, BLOCK=128)
    return y


def reference(wq, wr, idx):
    m = wr.shape[0]
    return wq[idx // m] * wr[idx % m]


SWEEP = [{"N": 65536, "V": 1000000, "m": 1000, "D": 128}, {"N": 39999, "V": 77777, "m": 41, "D": 200}]
SWEEP_CPU = [{"N": 60, "V": 77, "m": 9, "D": 20}, {"N": 31, "V": 16, "m": 16, "D": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    V, m, D = dims["V"], dims["m"], dims["D"]
    wq = torch.randn(triton.cdiv(V, max(1, m)), D, device=device, dtype=dtype)
    wr = torch.randn(m, D, device=device, dtype=dtype)
    return wq, wr, torch.randint(0, V, (dims["N"],), device=device)


# ---- backward ----


@triton.jit
def qr_embedding_backward_kernel(
    wq_ptr, wr_ptr, idx_ptr, dy_ptr, dwq_ptr, dwr_ptr, m, D, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(idx_ptr + t)
    at_q, at_r = i // m * D + d, i % m * D + d
    dy = tl.load(dy_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    q = tl.load(wq_ptr + at_q, mask=d < D, other=0.0).to(tl.float32)
    r = tl.load(wr_ptr + at_r, mask=d < D, other=0.0).to(tl.float32)
    tl.atomic_add(dwq_ptr + at_q, dy * r, mask=d < D, sem="relaxed")
    tl.atomic_add(dwr_ptr + at_r, dy * q, mask=d < D, sem="relaxed")


class QREmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wq, wr, idx):
        wq, wr, idx = wq.contiguous(), wr.contiguous(), idx.contiguous()
        ctx.save_for_backward(wq, wr, idx)
        return qr_embedding(wq, wr, idx)

    @staticmethod
    def backward(ctx, dy):
        wq, wr, idx = ctx.saved_tensors
        m, D = wr.shape
        dwq = torch.zeros(wq.shape, device=wq.device, dtype=torch.float32)
        dwr = torch.zeros(wr.shape, device=wr.device, dtype=torch.float32)
        qr_embedding_backward_kernel[(idx.numel(), triton.cdiv(D, 128))](
            wq, wr, idx, dy.contiguous(), dwq, dwr, m, D, BLOCK=128
        )
        needs = ctx.needs_input_grad
        return dwq.to(wq.dtype) if needs[0] else None, dwr.to(wr.dtype) if needs[1] else None, None


def qr_embedding_autograd(wq, wr, idx):
    return QREmbedding.apply(wq, wr, idx)
