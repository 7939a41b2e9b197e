"""Soft ranks from pairwise sigmoids.

Forward    r_i = 1 + sum_j sigma((s_j - s_i) / t)
Backward   with w_ij = sigma'((s_j - s_i) / t) / t, an even function of the difference, so w_ij = w_ji:
           s_i appears in r_i with the weight -sum_j w_ij and in every r_j with w_ji, so
           ds_i = sum_j w_ij (dr_j - dr_i)

Forward schedule: a program owns (batch, tile of i) and walks tiles of j.
Backward schedule: an item acts as a row and as a column of the pair matrix. Since w is symmetric, the owner
of i can take both roles in one walk over j: one kernel, no atomics, no transposed pass, and the pair matrix
is never stored.

op: soft_rank
schedule: swap_owner
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def soft_rank_kernel(s_ptr, r_ptr, N, t, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    s_i = tl.load(s_ptr + batch * N + i, mask=i < N, other=0.0).to(tl.float32)
    r = tl.full([BLOCK_I], 1.0, dtype=tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        s_j = tl.load(s_ptr + batch * N + j, mask=j < N, other=0.0).to(tl.float32)
        sigma = tl.sigmoid((s_j[None, :] - s_i[:, None]) / t)
        r += tl.sum(tl.where(j[None, :] < N, sigma, 0.0), axis=1)
    tl.store(r_ptr + batch * N + i, r, mask=i < N)


@autodiff(inputs_require_grad=(0,))
def soft_rank(s, t=1.0):
    """s: (B, N) scores; t: the temperature. The largest score has the smallest rank."""
    if t <= 0:
        raise ValueError("the temperature must be positive")
    s = s.contiguous()
    B, N = s.shape
    r = torch.empty_like(s)
    soft_rank_kernel[(triton.cdiv(N, 16), B)](s, r, N, t, BLOCK_I=16, BLOCK_J=32)
    return r


def reference(s, t=1.0):
    return 1 + torch.sigmoid((s[:, None, :] - s[:, :, None]) / t).sum(-1)


SWEEP = [{"B": 512, "N": 512}, {"B": 64, "N": 2048}, {"B": 33, "N": 1001}]
SWEEP_CPU = [{"B": 7, "N": 39}, {"B": 1, "N": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["N"], device=device, dtype=dtype),), {"t": 0.7}


# ---- backward ----


@triton.jit
def soft_rank_backward_kernel(s_ptr, dr_ptr, ds_ptr, N, t, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    s_i = tl.load(s_ptr + batch * N + i, mask=i < N, other=0.0).to(tl.float32)
    dr_i = tl.load(dr_ptr + batch * N + i, mask=i < N, other=0.0).to(tl.float32)
    ds = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        s_j = tl.load(s_ptr + batch * N + j, mask=j < N, other=0.0).to(tl.float32)
        dr_j = tl.load(dr_ptr + batch * N + j, mask=j < N, other=0.0).to(tl.float32)
        sigma = tl.sigmoid((s_j[None, :] - s_i[:, None]) / t)
        w = tl.where(j[None, :] < N, sigma * (1 - sigma) / t, 0.0)
        ds += tl.sum(w * (dr_j[None, :] - dr_i[:, None]), axis=1)
    tl.store(ds_ptr + batch * N + i, ds, mask=i < N)


class SoftRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, t):
        s = s.contiguous()
        ctx.save_for_backward(s)
        ctx.t = t
        return soft_rank(s, t)

    @staticmethod
    def backward(ctx, dr):
        (s,) = ctx.saved_tensors
        dr = dr.contiguous()
        B, N = s.shape
        ds = torch.empty_like(s)
        soft_rank_backward_kernel[(triton.cdiv(N, 16), B)](s, dr, ds, N, ctx.t, BLOCK_I=16, BLOCK_J=32)
        return ds, None


def soft_rank_autograd(s, t=1.0):
    return SoftRank.apply(s, t)
