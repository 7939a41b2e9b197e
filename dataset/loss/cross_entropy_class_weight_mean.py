"""Cross-entropy of many short rows with a weight for each class, as the weighted mean.

Forward    l_i = lse(z_i) - z_it,  W = sum_i w_t(i),  L = (1 / W) sum_i w_t(i) l_i,  t = t(i) the target
Backward   W does not depend on z:  dz_ij = (dL w_t / W) (p_ij - [j = t]),  p_i = softmax(z_i)

Forward schedule: with tens or a few hundred classes a row is too short for a program, so one owns a tile of
rows with all of their classes. It leaves two numbers, its parts of sum w l and of W; one program adds both.
Backward schedule: the same tiles. A row is whole in registers, so its maximum and sum are made again there:
saving lse would spare arithmetic that a kernel bound by memory has to spare, for a tensor more. Of the
forward only W is kept, one number on the device; dL / W is formed by every program and w_t gathered from a
table that stays in cache.

op: cross_entropy_weighted
schedule: row_reduce_correct, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = 4096  # numbers in a tile


def tiling(M, C):
    """The grid and the tile of rows by classes."""
    BLOCK_C = triton.next_power_of_2(C)
    BLOCK_M = max(1, TILE // BLOCK_C)
    return (triton.cdiv(M, BLOCK_M),), {"BLOCK_M": BLOCK_M, "BLOCK_C": BLOCK_C}


@triton.jit
def load_rows(z_ptr, rows, cols, M, C):
    mask = (rows[:, None] < M) & (cols[None, :] < C)
    z = tl.load(z_ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(cols[None, :] < C, z, -float("inf"))


@triton.jit
def weighted_parts_kernel(
    z_ptr, target_ptr, weight_ptr, part_ptr, M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    z = load_rows(z_ptr, rows, tl.arange(0, BLOCK_C), M, C)
    m = tl.max(z, axis=1)
    lse = m + tl.log(tl.sum(tl.exp(z - m[:, None]), axis=1))
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    w = tl.load(weight_ptr + target, mask=rows < M, other=0.0).to(tl.float32)
    z_t = tl.load(z_ptr + rows * C + target, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0), tl.sum(w * (lse - z_t), axis=0))
    tl.store(part_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(w, axis=0))


@triton.jit
def weighted_mean_kernel(part_ptr, loss_ptr, total_ptr, parts, BLOCK: tl.constexpr):
    loss = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        loss += tl.load(part_ptr + i, mask=i < parts, other=0.0)
        total += tl.load(part_ptr + parts + i, mask=i < parts, other=0.0)
    W = tl.sum(total, axis=0)
    tl.store(total_ptr, W)
    tl.store(loss_ptr, tl.sum(loss, axis=0) / W)


def weighted_forward(logits, target, weight):
    M, C = logits.shape
    if C > 4096:
        raise ValueError(f"{C} classes do not fit one tile")
    grid, blocks = tiling(M, C)
    part = torch.empty((2, *grid), device=logits.device, dtype=torch.float32)
    loss, total = (torch.empty((), device=logits.device, dtype=torch.float32) for _ in range(2))
    weighted_parts_kernel[grid](logits, target, weight, part, M, C, **blocks)
    weighted_mean_kernel[(1,)](part, loss, total, grid[0], BLOCK=1024)
    return loss, total


@autodiff(inputs_require_grad=(0,))
def cross_entropy_weighted(logits, target, weight):
    """logits: (M, C); target: int64 (M); weight: (C), a constant; gives one number in float32."""
    return weighted_forward(logits.contiguous(), target.contiguous(), weight.contiguous())[0]


def reference(logits, target, weight):
    return torch.nn.functional.cross_entropy(logits, target, weight)


SWEEP = [{"M": 524288, "C": 150}, {"M": 100003, "C": 1000}]
SWEEP_CPU = [{"M": 131, "C": 50}, {"M": 31, "C": 260}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, C = dims["M"], dims["C"]
    logits = 2 * torch.randn(M, C, device=device, dtype=dtype)
    weight = 0.1 + torch.rand(C, device=device, dtype=dtype)
    return logits, torch.randint(0, C, (M,), device=device), weight


# ---- backward ----


@triton.jit
def weighted_backward_kernel(
    z_ptr, target_ptr, weight_ptr, total_ptr, dloss_ptr, dz_ptr, M, C,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_C)
    z = load_rows(z_ptr, rows, cols, M, C)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    w = tl.load(weight_ptr + target, mask=rows < M, other=0.0).to(tl.float32)
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    onehot = tl.where(cols[None, :] == target[:, None], 1.0, 0.0)
    g = tl.load(dloss_ptr).to(tl.float32) / tl.load(total_ptr)
    dz = g * w[:, None] * (p - onehot)
    mask = (rows[:, None] < M) & (cols[None, :] < C)
    tl.store(dz_ptr + rows[:, None] * C + cols[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)


class CrossEntropyWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight):
        logits, target, weight = logits.contiguous(), target.contiguous(), weight.contiguous()
        loss, total = weighted_forward(logits, target, weight)
        ctx.save_for_backward(logits, target, weight, total)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, target, weight, total = ctx.saved_tensors
        M, C = logits.shape
        dz = torch.empty_like(logits)
        grid, blocks = tiling(M, C)
        weighted_backward_kernel[grid](logits, target, weight, total, dloss, dz, M, C, **blocks)
        return dz, None, None


def cross_entropy_weighted_autograd(logits, target, weight):
    return CrossEntropyWeighted.apply(logits, target, weight)
