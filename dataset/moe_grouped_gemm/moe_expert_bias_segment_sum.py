"""Each row plus the bias of its expert; rows stand sorted by expert.

Forward    y_i = x_i + b_{e_i},   e_1 <= e_2 <= ...
Backward   dx_i = dy_i,   db_e = sum over the rows i of e of dy_i

Forward schedule: a program owns a tile of rows and columns and gathers the bias row of each of its rows.
Backward schedule: seen from the rows, db is a scatter with as many collisions as an expert has rows. As the
rows are sorted, those of an expert are one segment, from offset_e to offset_{e+1}: the owner of (expert,
column tile) walks it, adds in registers, and stores once, zeros for an expert without rows; no atomics and a
fixed order. dx is dy in storage of its own, so somebody has to copy it; the walk for db touches each number
of dy exactly once, and writes the copy as it goes. That is one read of dy for both gradients. Experts of very
different sizes make uneven walks; many columns, or parts as of a split sum, would then even them out.

op: moe_bias
schedule: segment_gather
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_M": 32, "BLOCK_N": 64}


@triton.jit
def expert_bias_kernel(x_ptr, b_ptr, expert_ptr, y_ptr, T, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (i[:, None] < T) & (n[None, :] < N)
    expert = tl.load(expert_ptr + i, mask=i < T, other=0)
    x = tl.load(x_ptr + i[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + expert[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + i[:, None] * N + n[None, :], (x + b).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def expert_bias(x, b, expert):
    """x: (T, N); b: (E, N); expert: int64 (T), in rising order, all below E."""
    if b.shape[1] != x.shape[1] or expert.shape[0] != x.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, b {tuple(b.shape)}, {expert.shape[0]} experts do not fit")
    x, (T, N) = x.contiguous(), x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(T, 32), triton.cdiv(N, 64))
    expert_bias_kernel[grid](x, b.contiguous(), expert.contiguous(), y, T, N, **BLOCKS)
    return y


def reference(x, b, expert):
    return x + b[expert]


SWEEP = [{"T": 32768, "E": 64, "N": 2048}, {"T": 16387, "E": 8, "N": 5000}]
SWEEP_CPU = [{"T": 43, "E": 4, "N": 33}, {"T": 70, "E": 9, "N": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E, N = dims["T"], dims["E"], dims["N"]
    x, b = (torch.randn(size, N, device=device, dtype=dtype) for size in (T, E))
    return x, b, torch.randint(0, max(1, E), (T,), device=device).sort().values


# ---- backward ----


@triton.jit
def expert_bias_backward_kernel(
    dy_ptr, offsets_ptr, dx_ptr, db_ptr, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    expert = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + expert + 1)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        mask = (i[:, None] < end) & (n[None, :] < N)
        dy = tl.load(dy_ptr + i[:, None] * N + n[None, :], mask=mask, other=0.0)
        tl.store(dx_ptr + i[:, None] * N + n[None, :], dy, mask=mask)
        db += dy.to(tl.float32)
    db = tl.sum(db, axis=0)
    tl.store(db_ptr + expert * N + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


class ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, expert):
        edges = torch.arange(b.shape[0] + 1, device=expert.device)
        ctx.save_for_backward(torch.searchsorted(expert.contiguous(), edges))
        ctx.b_dtype = b.dtype
        return expert_bias(x, b, expert)

    @staticmethod
    def backward(ctx, dy):
        (offsets,) = ctx.saved_tensors
        dy, N, E, needs = dy.contiguous(), dy.shape[1], offsets.numel() - 1, ctx.needs_input_grad
        dx, db = torch.empty_like(dy), torch.empty((E, N), device=dy.device, dtype=ctx.b_dtype)
        expert_bias_backward_kernel[(E, triton.cdiv(N, 64))](dy, offsets, dx, db, N, **BLOCKS)
        return dx if needs[0] else None, db if needs[1] else None, None


def expert_bias_autograd(x, b, expert):
    return ExpertBias.apply(x, b, expert)
