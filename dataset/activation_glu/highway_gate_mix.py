"""Gated mix of a layer's output with its input (highway layers, gated residuals, the update of a GRU).

Forward    t = s(z),  y = t h + (1 - t) x = x + t (h - x),  s the sigmoid
Backward   dh = dy t,  dx = dy s(-z),  dz = dy (h - x) t s(-z)

Forward schedule: flat tiles; the mix is one product with the difference.
Backward schedule: flat tiles, with z, h and x kept and t made again. One pass of four loads and three stores,
where a graph of the operations makes a pass for each of the product, the difference and the sigmoid, and
keeps t and h - x. 1 - t is s(-z), made of the same exponential: a gate that is nearly open passes the small
gradient to x that it should, which 1 - t rounds to a multiple of 2^-24. Each gradient is compiled in only if
it is wanted; without dz, h and x are not read, and then it is a scaling of dy.

op: highway
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gate(z):
    """s(z) and s(-z) from one exponential."""
    e = tl.exp(tl.where(z > 0, -z, z))
    large, small = 1 / (1 + e), e / (1 + e)
    return tl.where(z > 0, large, small), tl.where(z > 0, small, large)


@triton.jit
def highway_kernel(h_ptr, x_ptr, z_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    h = tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    t, _ = gate(tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    tl.store(y_ptr + offs, (x + t * (h - x)).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def highway(h, x, z):
    """h, x, z: one shape; z is the gate before its sigmoid."""
    if not h.shape == x.shape == z.shape:
        raise ValueError("h, x and z must have one shape")
    h, x, z = h.contiguous(), x.contiguous(), z.contiguous()
    y = torch.empty_like(h)
    highway_kernel[(triton.cdiv(y.numel(), 1024),)](h, x, z, y, y.numel(), BLOCK=1024)
    return y


def reference(h, x, z):
    return x + torch.sigmoid(z) * (h - x)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 5, "N": 102}, {"M": 3, "N": 700}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def highway_backward_kernel(
    h_ptr, x_ptr, z_ptr, dy_ptr, dh_ptr, dx_ptr, dz_ptr, n_elements,
    NEEDS_DH: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DZ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    t, rest = gate(tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if NEEDS_DH:
        tl.store(dh_ptr + offs, (dy * t).to(dh_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DX:
        tl.store(dx_ptr + offs, (dy * rest).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DZ:
        h = tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dz_ptr + offs, (dy * (h - x) * t * rest).to(dz_ptr.dtype.element_ty), mask=mask)


class Highway(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, x, z):
        h, x, z = h.contiguous(), x.contiguous(), z.contiguous()
        ctx.save_for_backward(h, x, z)
        return highway(h, x, z)

    @staticmethod
    def backward(ctx, dy):
        h, x, z = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = tuple(torch.empty_like(z) if needed else None for needed in needs)
        highway_backward_kernel[(triton.cdiv(z.numel(), 1024),)](
            h, x, z, dy.contiguous(), *grads, z.numel(),
            NEEDS_DH=needs[0], NEEDS_DX=needs[1], NEEDS_DZ=needs[2], BLOCK=1024,
        )  # fmt: skip
        return grads


def highway_autograd(h, x, z):
    return Highway.apply(h, x, z)
