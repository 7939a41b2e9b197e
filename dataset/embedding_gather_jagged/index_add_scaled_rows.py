"""Residual of some samples, scaled by a learned gain: stochastic depth that computes only what it keeps.

Forward    y_b = base_b + alpha g * x_i if b = idx_i for an i, and base_b else;  idx without repetition,
           g a gain for each column
Backward   dbase = dy;   dx_i = alpha g * dy_{idx_i};   dg = alpha sum over i and tokens of dy_{idx_i} * x_i

Forward schedule: a program owns a tile of tokens of one sample of y. Whether the sample was kept, and as
which i, is in an inverse list, so y is written once: copying base and then adding to some of it would write
those twice.
Backward schedule: dbase is dy as it came, dx a scaled part of it and dg a sum over that part, so one read of
dy serves all three. G programs walk the rows of dy pid, pid + G, ...: each stores the row of dbase, and if
the sample was kept, which the inverse list says, also the row of dx, and adds to its part of dg in registers.
A dropped sample costs a copy and no more. With idx unique no two rows of dx meet; a second kernel adds the
parts.

op: scaled_index_add
schedule: gather_transpose, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def scaled_add_kernel(
    base_ptr, x_ptr, g_ptr, inverse_ptr, y_ptr, T, D, alpha, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    i = tl.load(inverse_ptr + b)
    mask = (t[:, None] < T) & (d[None, :] < D)
    offs = t[:, None] * D + d[None, :]
    y = tl.load(base_ptr + b * T * D + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + i * T * D + offs, mask=mask & (i >= 0), other=0.0).to(tl.float32)
    g = tl.load(g_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y += alpha * g[None, :] * x
    tl.store(y_ptr + b * T * D + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def inverse_of(idx, B):
    """For each sample of base its place in idx, or -1."""
    inverse = torch.full((B,), -1, device=idx.device, dtype=torch.int64)
    inverse[idx] = torch.arange(idx.numel(), device=idx.device)
    return inverse


@autodiff(inputs_require_grad=(0, 1, 2))
def scaled_index_add(base, x, g, idx, alpha=1.0):
    """base: (B, T, D); x: (M, T, D); g: (D); idx: int64 (M), each sample of base at most once."""
    (B, T, D), M = base.shape, x.shape[0]
    if x.shape != (M, T, D) or g.shape != (D,) or idx.shape != (M,):
        raise ValueError(f"base {tuple(base.shape)}, x {tuple(x.shape)} and g {tuple(g.shape)} do not fit")
    y, inverse = torch.empty((B, T, D), device=x.device, dtype=base.dtype), inverse_of(idx, B)
    grid = (B, triton.cdiv(T, 16), triton.cdiv(D, 128))
    scaled_add_kernel[grid](
        base.contiguous(), x.contiguous(), g.contiguous(), inverse, y, T, D, alpha, BLOCK_T=16, BLOCK_D=128
    )
    return y


def reference(base, x, g, idx, alpha=1.0):
    return base.index_add(0, idx, alpha * g * x)


SWEEP = [{"B": 64, "M": 48, "T": 257, "D": 1024}, {"B": 31, "M": 17, "T": 500, "D": 390}]
SWEEP_CPU = [{"B": 9, "M": 5, "T": 7, "D": 31}, {"B": 3, "M": 3, "T": 20, "D": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    M = min(dims["M"], B)
    base = torch.randn(B, T, D, device=device, dtype=dtype)
    x = torch.randn(M, T, D, device=device, dtype=dtype)
    g = torch.randn(D, device=device, dtype=dtype)
    return base, x, g, torch.randperm(B, device=device)[:M], B / max(1, M)


# ---- backward ----

MAX_GROUPS = 256


@triton.jit
def rows_kernel(
    x_ptr, g_ptr, inverse_ptr, dy_ptr, dbase_ptr, dx_ptr, part_ptr, rows, T, D, alpha, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = alpha * tl.load(g_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        i = tl.load(inverse_ptr + row // T)
        own = (i * T + row % T) * D + d
        dy = tl.load(dy_ptr + row * D + d, mask=d < D, other=0.0)
        tl.store(dbase_ptr + row * D + d, dy, mask=d < D)
        if i >= 0:
            grad = dy.to(tl.float32)
            dg += grad * tl.load(x_ptr + own, mask=d < D, other=0.0).to(tl.float32)
            tl.store(dx_ptr + own, (g * grad).to(dx_ptr.dtype.element_ty), mask=d < D)
    tl.store(part_ptr + pid * D + d, alpha * dg, mask=d < D)


@triton.jit
def add_parts_kernel(part_ptr, dg_ptr, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        i = start + tl.arange(0, BLOCK_G)
        mask = (i[:, None] < G) & (d[None, :] < D)
        acc += tl.load(part_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(dg_ptr + d, tl.sum(acc, axis=0).to(dg_ptr.dtype.element_ty), mask=d < D)


class ScaledIndexAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base, x, g, idx, alpha):
        x, g, idx = x.contiguous(), g.contiguous(), idx.contiguous()
        ctx.save_for_backward(x, g, idx)
        ctx.alpha = alpha
        return scaled_index_add(base, x, g, idx, alpha)

    @staticmethod
    def backward(ctx, dy):
        x, g, idx = ctx.saved_tensors
        dy, (B, T, D), needs = dy.contiguous(), dy.shape, ctx.needs_input_grad
        dbase, dx, dg = torch.empty_like(dy), torch.empty_like(x), None
        G = min(B * T, MAX_GROUPS)
        part = torch.empty((G, D), device=x.device, dtype=torch.float32)
        rows_kernel[(G, triton.cdiv(D, 512))](
            x, g, inverse_of(idx, B), dy, dbase, dx, part, B * T, T, D, ctx.alpha, BLOCK=512
        )
        if needs[2]:
            dg = torch.empty_like(g)
            add_parts_kernel[(triton.cdiv(D, 64),)](part, dg, G, D, BLOCK_G=32, BLOCK_D=64)
        return dbase if needs[0] else None, dx if needs[1] else None, dg, None, None


def scaled_index_add_autograd(base, x, g, idx, alpha=1.0):
    return ScaledIndexAdd.apply(base, x, g, idx, alpha)
