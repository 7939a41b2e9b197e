"""Product of matrices over (max, +), the step of shortest paths and of Viterbi decoding.

Forward    k_ij = the first k with the largest A_ik + B_kj,   C_ij = A_i,k_ij + B_k_ij,j
Backward   k is piecewise constant:   dA_ik = sum_{j: k_ij = k} dC_ij,   dB_kj = sum_{i: k_ij = k} dC_ij

Forward schedule: a program owns a tile of C and walks k with the best value and its place in registers; there
is no tensor core for it, so k goes one by one, an outer sum of a column and a row each.
Backward schedule: A and B are not needed, the saved places are all of it. A place sends dC_ij to one number
of A and one of B, and atomics would queue up where one k wins a whole row. The owner of a tile of dA walks j
instead and adds dC where the place is its own k: a comparison of (i, j) with k, in registers. The owner of dB
walks i. Both read places and dC only, each as often as the other dimension has tiles, and every number is
stored once.

op: maxplus_matmul
schedule: index_or_seed_replay, swap_owner
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def maxplus_kernel(a_ptr, b_ptr, c_ptr, place_ptr, M, N, K, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    best = tl.full([BLOCK, BLOCK], -float("inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK, BLOCK], dtype=tl.int32)
    for k in range(K):
        a = tl.load(a_ptr + i * K + k, mask=i < M, other=0.0)
        b = tl.load(b_ptr + j + k * N, mask=j < N, other=0.0)
        c = a[:, None] + b[None, :]
        place = tl.where(c > best, k, place)
        best = tl.where(c > best, c, best)
    mask = (i[:, None] < M) & (j[None, :] < N)
    offs = i[:, None] * N + j[None, :]
    tl.store(c_ptr + offs, best, mask=mask)
    tl.store(place_ptr + offs, place, mask=mask)


def maxplus_forward(a, b):
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K or K == 0:
        raise ValueError("need a (M, K) and b (K, N), K at least 1")
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    place = torch.empty((M, N), device=a.device, dtype=torch.int32)
    grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
    maxplus_kernel[grid](a, b, c, place, M, N, K, BLOCK=64, num_warps=8)
    return c, place


@autodiff(inputs_require_grad=(0, 1))
def maxplus_matmul(a, b):
    """a: (M, K); b: (K, N); float32; gives (M, N)."""
    return maxplus_forward(a.contiguous(), b.contiguous())[0]


def reference(a, b):
    return (a[:, :, None] + b).max(dim=1).values


SWEEP = [{"M": 1024, "K": 512, "N": 1024}, {"M": 2039, "K": 190, "N": 777}]
SWEEP_CPU = [{"M": 23, "K": 19, "N": 27}, {"M": 66, "K": 7, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def collect_kernel(
    place_ptr, dc_ptr, grad_ptr, R, W, K, row_stride, walk_stride, grad_stride, k_stride,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """For R rows of dA (or columns of dB) the sums over what is walked, W long, where the place is k."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    grad = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
    for start in range(0, W, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        mask = (r[:, None] < R) & (w[None, :] < W)
        offs = r[:, None] * row_stride + w[None, :] * walk_stride
        place = tl.load(place_ptr + offs, mask=mask, other=-1)
        dc = tl.load(dc_ptr + offs, mask=mask, other=0.0)
        mine = place[:, :, None] == k[None, None, :]
        grad += tl.sum(tl.where(mine, dc[:, :, None], 0.0), axis=1)
    mask = (r[:, None] < R) & (k[None, :] < K)
    tl.store(grad_ptr + r[:, None] * grad_stride + k[None, :] * k_stride, grad, mask=mask)


class MaxPlusMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        c, place = maxplus_forward(a.contiguous(), b.contiguous())
        ctx.save_for_backward(place)
        ctx.K = a.shape[1]
        return c

    @staticmethod
    def backward(ctx, dc):
        (place,) = ctx.saved_tensors
        dc, (M, N), K = dc.contiguous(), place.shape, ctx.K
        blocks = {"BLOCK_R": 16, "BLOCK_W": 16, "BLOCK_K": 32}
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty((M, K), device=dc.device, dtype=dc.dtype)
            grid = (triton.cdiv(M, 16), triton.cdiv(K, 32))
            collect_kernel[grid](place, dc, da, M, N, K, N, 1, K, 1, **blocks)
        if ctx.needs_input_grad[1]:
            db = torch.empty((K, N), device=dc.device, dtype=dc.dtype)
            grid = (triton.cdiv(N, 16), triton.cdiv(K, 32))
            collect_kernel[grid](place, dc, db, N, M, K, 1, N, 1, N, **blocks)
        return da, db


def maxplus_matmul_autograd(a, b):
    return MaxPlusMatmul.apply(a, b)
