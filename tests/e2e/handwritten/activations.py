"""Two activations, and a product that has arguments of its own."""

import torch
import triton
import triton.language as tl


@triton.jit
def _act(x_ptr, dy_ptr, out_ptr, n, KIND: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    s = tl.sigmoid(x)
    if KIND == "silu":
        value = s * (1 + x * (1 - s)) if BACKWARD else x * s
    else:
        value = s * (1 - s) if BACKWARD else s
    if BACKWARD:
        value *= tl.load(dy_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, value, mask=i < n)


def _launch(x, dy, kind):
    out = torch.empty_like(x)
    given = x if dy is None else dy
    _act[(triton.cdiv(x.numel(), 64),)](x, given, out, x.numel(), kind, dy is not None, BLOCK=64)
    return out


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _launch(x, None, "silu")

    @staticmethod
    def backward(ctx, dy):
        return _launch(ctx.saved_tensors[0], dy.contiguous(), "silu")


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _launch(x, None, "sigmoid")

    @staticmethod
    def backward(ctx, dy):
        return _launch(ctx.saved_tensors[0], dy.contiguous(), "sigmoid")


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, a * tl.load(b_ptr + i, mask=i < n, other=0.0), mask=i < n)


def _multiply(a, b):
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    _product[(triton.cdiv(a.numel(), 32),)](a, b, out, a.numel(), BLOCK=32)
    return out


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return _multiply(dy, b), _multiply(dy, a)


silu = SiLU.apply


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return Sigmoid.apply(x)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return Product.apply(a, b)


SWEEP = [{"M": 6, "N": 20}]
SWEEP_product = [{"N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


def make_args_product(dims, device="cuda", dtype=torch.float32):
    a, b = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
    return a, b
