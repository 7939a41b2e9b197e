"""Layer scale: a branch is scaled by a learned vector before it joins the residual stream.

Forward    y = x + g_c f
Backward   dx = dy,  df = dy g_c,  dg_c = sum over rows of dy f

Forward schedule: 2D tiles.
Backward schedule: a program owns a row block and a column tile, and one read of dy makes three gradients. The
sums of dg are in registers when a program ends; it adds BLOCK_N numbers to a cleared fp32 vector by atomics,
for which row blocks are made long: the vector has few addresses and all row blocks meet there, so what
matters is how seldom, M / ROWS times an address. Against slots and a kernel that adds them this is one
launch less and an order of additions that may change in the last digit. dx is dy, but a copy: gradients that
share memory would change each other when one is added to in place.

op: layer_scale
schedule: same_tile_pointwise, atomic_accumulate
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def layer_scale_kernel(
    x_ptr, f_ptr, g_ptr, y_ptr, M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows[:, None] < M) & (cols[None, :] < C)
    offs = rows[:, None] * C + cols[None, :]
    g = tl.load(g_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (x + g[None, :] * f).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_scale(x, f, g):
    """x, f: (M, C); g: (C)."""
    if x.shape != f.shape:
        raise ValueError("x and f must have one shape")
    M, C = x.shape
    y = torch.empty((M, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 8), triton.cdiv(C, 128))
    layer_scale_kernel[grid](x.contiguous(), f.contiguous(), g.contiguous(), y, M, C, BLOCK_M=8, BLOCK_C=128)
    return y


def reference(x, f, g):
    return x + g * f


SWEEP = [{"M": 50432, "C": 1024}, {"M": 25600, "C": 771}]
SWEEP_CPU = [{"M": 51, "C": 30}, {"M": 300, "C": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, f = (torch.randn(dims["M"], dims["C"], device=device, dtype=dtype) for _ in range(2))
    return x, f, 0.1 * torch.randn(dims["C"], device=device, dtype=dtype)


# ---- backward ----

ROWS = 256  # of a program


@triton.jit
def layer_scale_backward_kernel(
    f_ptr, g_ptr, dy_ptr, dx_ptr, df_ptr, dg_ptr, M, C, ROWS: tl.constexpr, NEEDS_DX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    g = tl.load(g_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        rows = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (cols[None, :] < C)
        offs = rows[:, None] * C + cols[None, :]
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        f = tl.load(f_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        df = dy.to(tl.float32) * g[None, :]
        tl.store(df_ptr + offs, df.to(df_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DX:
            tl.store(dx_ptr + offs, dy, mask=mask)
        total += dy.to(tl.float32) * f
    tl.atomic_add(dg_ptr + cols, tl.sum(total, axis=0), mask=cols < C, sem="relaxed")


class LayerScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g):
        f, g = f.contiguous(), g.contiguous()
        ctx.save_for_backward(f, g)
        return layer_scale(x, f, g)

    @staticmethod
    def backward(ctx, dy):
        f, g = ctx.saved_tensors
        (M, C), needs = f.shape, ctx.needs_input_grad
        dx = torch.empty_like(f) if needs[0] else None
        df, dg = torch.empty_like(f), torch.zeros(C, device=f.device, dtype=torch.float32)
        layer_scale_backward_kernel[(triton.cdiv(M, ROWS), triton.cdiv(C, 128))](
            f, g, dy.contiguous(), dx, df, dg, M, C, ROWS=ROWS, NEEDS_DX=needs[0], BLOCK_M=8, BLOCK_C=128
        )
        return dx, df if needs[1] else None, dg.to(g.dtype) if needs[2] else None


def layer_scale_autograd(x, f, g):
    return LayerScale.apply(x, f, g)
