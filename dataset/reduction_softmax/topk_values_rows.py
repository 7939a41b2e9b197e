"""The k largest values of each row, in falling order, and where they stand.

Forward    i_1 .. i_k the places of the k largest of a row x,  v_j = x_{i_j}
Backward   the places are piecewise constant, so dx_c = dv_j where c = i_j, and 0 elsewhere

Forward schedule: a program owns a row in one tile and makes k rounds: the first largest is taken and masked
away. Values and places (an output without gradient) are stored.
Backward schedule: the same owner, and x is not read again, the places replay the choice. Written as a
scatter, this would be a fill with zeros and then k scattered stores; the owner has the whole row, so it
compares each lane with the k places in registers, and stores the row once, zeros included. The places of
one row differ, so at most one comparison is true a lane and nothing is added.

op: topk
schedule: index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def topk_kernel(x_ptr, v_ptr, index_ptr, N, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    left = cols < N
    for j in range(K):
        largest = tl.max(tl.where(left, x, -float("inf")), axis=0)
        place = tl.min(tl.where(left & (x == largest), cols, BLOCK), axis=0)
        v = tl.sum(tl.where(cols == place, x, 0.0), axis=0)
        tl.store(v_ptr + row * K + j, v.to(v_ptr.dtype.element_ty))
        tl.store(index_ptr + row * K + j, place)
        left = left & (cols != place)


def topk_forward(x, k):
    N = x.shape[-1]
    if not 1 <= k <= N:
        raise ValueError(f"there are no {k} largest of {N}")
    if N > 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    v = torch.empty((*x.shape[:-1], k), device=x.device, dtype=x.dtype)
    index = torch.empty(v.shape, device=x.device, dtype=torch.int64)
    topk_kernel[(x.numel() // N,)](x, v, index, N, k, BLOCK=triton.next_power_of_2(N))
    return v, index


@autodiff(inputs_require_grad=(0,))
def topk(x, k):
    """x: (..., N), finite; gives the k largest of each row, (..., k), and their places, int64."""
    return topk_forward(x.contiguous(), k)


def reference(x, k):
    index = x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return x.gather(-1, index), index


SWEEP = [{"M": 16384, "N": 4096, "K": 8}, {"M": 8191, "N": 1000, "K": 32}]
SWEEP_CPU = [{"M": 21, "N": 50, "K": 5}, {"M": 40, "N": 17, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, min(dims["K"], dims["N"])


# ---- backward ----


@triton.jit
def topk_backward_kernel(dv_ptr, index_ptr, dx_ptr, N, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(K):
        place = tl.load(index_ptr + row * K + j)
        dv = tl.load(dv_ptr + row * K + j).to(tl.float32)
        dx = tl.where(cols == place, dv, dx)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        v, index = topk_forward(x.contiguous(), k)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return v, index

    @staticmethod
    def backward(ctx, dv, _):
        (index,) = ctx.saved_tensors
        N, K = ctx.shape[-1], index.shape[-1]
        dx = torch.empty(ctx.shape, device=dv.device, dtype=dv.dtype)
        grid = (index.numel() // K,)
        topk_backward_kernel[grid](dv.contiguous(), index, dx, N, K, BLOCK=triton.next_power_of_2(N))
        return dx, None


def topk_autograd(x, k):
    return TopK.apply(x, k)
