"""Reads queries, keys, values and the upstream each by strides of its own."""

import torch
import triton
import triton.language as tl


@triton.jit
def attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    N,
    scale,
    q_n,
    q_d,
    k_n,
    k_d,
    v_n,
    v_d,
    o_n,
    o_d,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, d, cols = tl.program_id(0), tl.arange(0, D), tl.arange(0, BLOCK)
    at = cols[:, None] * D + d[None, :]
    inside = cols[:, None] < N
    q, do = tl.load(q_ptr + row * q_n + d * q_d), tl.load(do_ptr + row * o_n + d * o_d)
    k = tl.load(k_ptr + cols[:, None] * k_n + d[None, :] * k_d, mask=inside, other=0.0)
    v = tl.load(v_ptr + cols[:, None] * v_n + d[None, :] * v_d, mask=inside, other=0.0)
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
        q, k, v = ctx.saved_tensors
        N, D = q.shape
        dq = torch.empty((N, D), device=q.device, dtype=q.dtype)
        dk, dv = (torch.zeros((N, D), device=q.device, dtype=q.dtype) for _ in range(2))
        strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
        attention_backward_kernel[(N,)](
            q, k, v, do, dq, dk, dv, N, D**-0.5, *strides, D=D, BLOCK=triton.next_power_of_2(N)
        )
        return dq, dk, dv


def attention_autograd(q, k, v):
    return Attention.apply(q, k, v)
