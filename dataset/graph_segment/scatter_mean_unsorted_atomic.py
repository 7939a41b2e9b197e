"""Mean of rows by an unsorted list of destinations: points into voxels, nodes into clusters.

Forward    n_s = number of i with id_i = s,  y_s = (1 / max(n_s, 1)) sum over those of x_i
Backward   dx_i = dy_{id_i} / n_{id_i}

Forward schedule: a program owns a tile of rows and of columns and adds it to sums by atomics in fp32, so the
ids need no order; the programs of the first columns count as well. A second kernel divides.
Backward schedule: the adjoint of a scatter is a gather, and a gather has no conflicts: the forward's owner of
a row reads the one row of dy that it went to and the count, divides, and stores. So the pair that needs
atomics needs them on one side only, and the gradient is the same bits on every run although y may not be. x
is not saved, just the ids and the counts.

op: scatter_mean
schedule: gather_transpose
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 16, "BLOCK_D": 64}


@triton.jit
def add_kernel(x_ptr, id_ptr, sum_ptr, n_ptr, M, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.load(id_ptr + i, mask=i < M, other=0)
    mask = (i[:, None] < M) & (d[None, :] < D)
    x = tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(sum_ptr + s[:, None] * D + d[None, :], x, mask=mask, sem="relaxed")
    if tl.program_id(1) == 0:
        one = tl.full([BLOCK_R], 1, dtype=tl.int32)
        tl.atomic_add(n_ptr + s, one, mask=i < M, sem="relaxed")


@triton.jit
def divide_kernel(sum_ptr, n_ptr, y_ptr, D, BLOCK_D: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.maximum(tl.load(n_ptr + s), 1).to(tl.float32)
    y = tl.load(sum_ptr + s * D + d, mask=d < D, other=0.0) / n
    tl.store(y_ptr + s * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def scatter_mean_forward(x, ids, S):
    (M, D), wide = x.shape, triton.cdiv(x.shape[1], TILE["BLOCK_D"])
    y = torch.empty((S, D), device=x.device, dtype=x.dtype)
    sums = torch.zeros((S, D), device=x.device, dtype=torch.float32)
    n = torch.zeros(S, device=x.device, dtype=torch.int32)
    add_kernel[(triton.cdiv(M, TILE["BLOCK_R"]), wide)](x, ids, sums, n, M, D, **TILE)
    divide_kernel[(S, wide)](sums, n, y, D, BLOCK_D=TILE["BLOCK_D"])
    return y, n


@autodiff(inputs_require_grad=(0,))
def scatter_mean(x, ids, S):
    """x: (M, D); ids: int64 (M), from 0 to S - 1, in any order; gives (S, D), 0 where no row went."""
    return scatter_mean_forward(x.contiguous(), ids.contiguous(), S)[0]


def reference(x, ids, S):
    n = torch.bincount(ids, minlength=S).clamp(min=1)
    return x.new_zeros(S, x.shape[1]).index_add(0, ids, x) / n[:, None]


SWEEP = [{"M": 400000, "S": 20000, "D": 64}, {"M": 60013, "S": 30011, "D": 150}]
SWEEP_CPU = [{"M": 80, "S": 12, "D": 15}, {"M": 37, "S": 50, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, S = dims["M"], dims["S"]
    x = torch.randn(M, dims["D"], device=device, dtype=dtype)
    return x, torch.randint(0, S, (M,), device=device), S


# ---- backward ----


@triton.jit
def gather_kernel(dy_ptr, id_ptr, n_ptr, dx_ptr, M, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.load(id_ptr + i, mask=i < M, other=0)
    n = tl.load(n_ptr + s, mask=i < M, other=1).to(tl.float32)  # at least row i itself
    mask = (i[:, None] < M) & (d[None, :] < D)
    dy = tl.load(dy_ptr + s[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = dy / n[:, None]
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class ScatterMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, S):
        ids = ids.contiguous()
        y, n = scatter_mean_forward(x.contiguous(), ids, S)
        ctx.save_for_backward(ids, n)
        return y

    @staticmethod
    def backward(ctx, dy):
        ids, n = ctx.saved_tensors
        M, D = ids.numel(), dy.shape[1]
        dx = torch.empty((M, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(M, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
        gather_kernel[grid](dy.contiguous(), ids, n, dx, M, D, **TILE)
        return dx, None, None


def scatter_mean_autograd(x, ids, S):
    return ScatterMean.apply(x, ids, S)
