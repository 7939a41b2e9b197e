"""A program owns a query row: dq in registers, dk and dv by atomics."""

import torch
import triton
import triton.language as tl


@triton.jit
def attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, N, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    row, d, cols = tl.program_id(0), tl.arange(0, D), tl.arange(0, BLOCK)
    at = cols[:, None] * D + d[None, :]
    inside = cols[:, None] < N
    q, do = tl.load(q_ptr + row * D + d), tl.load(do_ptr + row * D + d)
    k, v = tl.load(k_ptr + at, mask=inside, other=0.0), tl.load(v_ptr + at, mask=inside, other=0.0)
    s = tl.where(cols <= row, tl.sum(k * q[None, :], axis=1) * scale, -float("inf"))
    p = tl.exp(s - tl.max(s, axis=0))
    p = p / tl.sum(p, axis=0)
    dp = tl.sum(v * do[None, :], axis=1)
    ds = p * (dp - tl.sum(p * dp, axis=0)) * scale
    tl.store(dq_ptr + row * D + d, tl.sum(ds[:, None] * k, axis=0))
    tl.atomic_add(dk_ptr + at, ds[:, None] * q[None, :], mask=inside)
    tl.atomic_add(dv_ptr + at, p[:, None] * do[None, :], mask=inside)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attention(q, k, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = (t.contiguous() for t in ctx.saved_tensors)
        N, D = q.shape
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        block = triton.next_power_of_2(N)
        attention_backward_kernel[(N,)](q, k, v, do.contiguous(), dq, dk, dv, N, D**-0.5, D=D, BLOCK=block)
        return dq, dk, dv


def attention_autograd(q, k, v):
    return Attention.apply(q, k, v)
