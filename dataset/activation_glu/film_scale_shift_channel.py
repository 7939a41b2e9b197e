"""Feature-wise modulation: each channel of each image is scaled and shifted by its condition (FiLM).

Forward    y = x (1 + g_nc) + b_nc over the pixels of plane (n, c)
Backward   dx = dy (1 + g_nc),  dg_nc = sum over pixels of dy x,  db_nc = sum over pixels of dy

Forward schedule: a grid of (plane, pixel tile).
Backward schedule: the owner of a plane walks its pixels: one read of x and dy, one write of dx, and both sums
stay in registers. Nothing of dg or db is shared between planes, so what would be two reductions over dy and
a pointwise kernel, five passes over memory, is one of three. Planes are channels times images, thousands, and
a plane of a feature map is short; for the rare network of few and large planes its pixels would be split.

op: film
schedule: same_tile_pointwise, swap_owner
difficulty: 1
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def film_kernel(x_ptr, g_ptr, b_ptr, y_ptr, HW, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    pixels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + plane * HW + pixels, mask=pixels < HW, other=0.0).to(tl.float32)
    y = x * (1 + tl.load(g_ptr + plane).to(tl.float32)) + tl.load(b_ptr + plane).to(tl.float32)
    tl.store(y_ptr + plane * HW + pixels, y.to(y_ptr.dtype.element_ty), mask=pixels < HW)


@autodiff(inputs_require_grad=(0, 1, 2))
def film(x, g, b):
    """x: (N, C, H, W); g, b: (N, C)."""
    if not g.shape == b.shape == x.shape[:2]:
        raise ValueError("g and b have a number for each plane of x")
    x, g, b = x.contiguous(), g.contiguous(), b.contiguous()
    y, HW = torch.empty_like(x), x.shape[2] * x.shape[3]
    film_kernel[(g.numel(), triton.cdiv(HW, 1024))](x, g, b, y, HW, BLOCK=1024)
    return y


def reference(x, g, b):
    return x * (1 + g[:, :, None, None]) + b[:, :, None, None]


SWEEP = [{"N": 32, "C": 512, "H": 64, "W": 64}, {"N": 17, "C": 257, "H": 97, "W": 61}]
SWEEP_CPU = [{"N": 3, "C": 6, "H": 5, "W": 17}, {"N": 1, "C": 2, "H": 50, "W": 45}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C = dims["N"], dims["C"]
    x = torch.randn(N, C, dims["H"], dims["W"], device=device, dtype=dtype)
    return x, *(torch.randn(N, C, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def film_backward_kernel(x_ptr, g_ptr, dy_ptr, dx_ptr, dg_ptr, db_ptr, HW, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    scale = 1 + tl.load(g_ptr + plane).to(tl.float32)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, HW, BLOCK):
        pixels = start + tl.arange(0, BLOCK)
        offs, mask = plane * HW + pixels, pixels < HW
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, (dy * scale).to(dx_ptr.dtype.element_ty), mask=mask)
        dg += dy * x
        db += dy
    tl.store(dg_ptr + plane, tl.sum(dg, axis=0).to(dg_ptr.dtype.element_ty))
    tl.store(db_ptr + plane, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty))


class FiLM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, b):
        x, g = x.contiguous(), g.contiguous()
        ctx.save_for_backward(x, g)
        return film(x, g, b)

    @staticmethod
    def backward(ctx, dy):
        x, g = ctx.saved_tensors
        HW = x.shape[2] * x.shape[3]
        dx, dg, db = torch.empty_like(x), torch.empty_like(g), torch.empty_like(g)
        BLOCK = min(1024, triton.next_power_of_2(HW))
        film_backward_kernel[(g.numel(),)](x, g, dy.contiguous(), dx, dg, db, HW, BLOCK=BLOCK)
        grads = zip((dx, dg, db), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def film_autograd(x, g, b):
    return FiLM.apply(x, g, b)
