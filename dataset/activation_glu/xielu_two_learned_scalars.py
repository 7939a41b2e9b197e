"""xIELU: a quadratic on the positive side, an integrated exponential on the other, both of learned size.

Forward    p = softplus(u) and n = b + softplus(v) of learned scalars u and v,  b a constant;
           y = p x^2 + b x for x > 0,  y = n (e^x - 1 - x) + b x else
Backward   dx = dy (2 p x + b) for x > 0,  dy (n (e^x - 1) + b) else;
           du = s(u) sum_{x > 0} dy x^2,  dv = s(v) sum_{x <= 0} dy (e^x - 1 - x),  s the sigmoid

Forward schedule: flat tiles; every program makes p and n from two scalars that stay in cache.
Backward schedule: flat tiles again, several a program, which stores dx and leaves its two sums; one program
of a second kernel adds them and applies the chain through softplus, once to each sum. e^x - 1 near 0 has lost
its digits, and e^x - 1 - x, about x^2 / 2, all of them, so both come from a series there: the sums of dv are
made of just such small numbers.

op: xielu
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softplus(u):
    return tl.where(u > 0, u, 0.0) + tl.log(1 + tl.exp(tl.where(u > 0, -u, u)))


@triton.jit
def bend(x):
    """e^x - 1 - x for x <= 0."""
    series = x * x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x / 5040)))))
    return tl.where(x > -0.5, series, tl.exp(x) - 1 - x)


@triton.jit
def xielu_kernel(x_ptr, u_ptr, v_ptr, y_ptr, n_elements, beta, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = softplus(tl.load(u_ptr).to(tl.float32))
    n = beta + softplus(tl.load(v_ptr).to(tl.float32))
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    y = beta * x + tl.where(x > 0, p * x * x, n * bend(tl.where(x > 0, 0.0, x)))
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0, 1, 2))
def xielu(x, u, v, beta=0.5):
    """x: any shape; u, v: scalars, or tensors of one number."""
    x = x.contiguous()
    y = torch.empty_like(x)
    xielu_kernel[(triton.cdiv(x.numel(), 1024),)](x, u, v, y, x.numel(), beta, BLOCK=1024)
    return y


def reference(x, u, v, beta=0.5):
    softplus = torch.nn.functional.softplus
    low = x.clamp(max=0)
    return beta * x + torch.where(x > 0, softplus(u) * x * x, (beta + softplus(v)) * (torch.expm1(low) - low))


SWEEP = [{"M": 8192, "N": 14336}, {"M": 4099, "N": 2817}]
SWEEP_CPU = [{"M": 7, "N": 100}, {"M": 3, "N": 6001}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, *(torch.tensor(value, device=device, dtype=dtype) for value in (0.3, -0.4))


# ---- backward ----

CHUNK = 16384  # numbers of a program


@triton.jit
def xielu_backward_kernel(
    x_ptr, u_ptr, v_ptr, dy_ptr, dx_ptr, part_ptr, n_elements, beta, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    p = softplus(tl.load(u_ptr).to(tl.float32))
    n = beta + softplus(tl.load(v_ptr).to(tl.float32))
    dp = tl.zeros([BLOCK], dtype=tl.float32)
    dn = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offs = tl.program_id(0).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        mask = offs < n_elements
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        low = tl.where(x > 0, 0.0, x)
        bent = bend(low)
        dx = dy * (beta + tl.where(x > 0, 2 * p * x, n * (bent + low)))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dp += tl.where(x > 0, dy * x * x, 0.0)
        dn += dy * bent
    tl.store(part_ptr + tl.program_id(0), tl.sum(dp, axis=0))
    tl.store(part_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(dn, axis=0))


@triton.jit
def scalars_kernel(part_ptr, u_ptr, v_ptr, du_ptr, dv_ptr, parts, BLOCK: tl.constexpr):
    dp = tl.zeros([BLOCK], dtype=tl.float32)
    dn = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dp += tl.load(part_ptr + i, mask=i < parts, other=0.0)
        dn += tl.load(part_ptr + parts + i, mask=i < parts, other=0.0)
    du = tl.sum(dp, axis=0) * tl.sigmoid(tl.load(u_ptr).to(tl.float32))
    dv = tl.sum(dn, axis=0) * tl.sigmoid(tl.load(v_ptr).to(tl.float32))
    tl.store(du_ptr, du.to(du_ptr.dtype.element_ty))
    tl.store(dv_ptr, dv.to(dv_ptr.dtype.element_ty))


class XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, v, beta):
        x = x.contiguous()
        ctx.save_for_backward(x, u, v)
        ctx.beta = beta
        return xielu(x, u, v, beta)

    @staticmethod
    def backward(ctx, dy):
        x, u, v = ctx.saved_tensors
        dx, du, dv = torch.empty_like(x), torch.empty_like(u), torch.empty_like(v)
        parts, needs = triton.cdiv(x.numel(), CHUNK), ctx.needs_input_grad
        part = torch.empty((2, parts), device=x.device, dtype=torch.float32)
        xielu_backward_kernel[(parts,)](
            x, u, v, dy.contiguous(), dx, part, x.numel(), ctx.beta, CHUNK=CHUNK, BLOCK=1024
        )
        if needs[1] or needs[2]:
            scalars_kernel[(1,)](part, u, v, du, dv, parts, BLOCK=1024)
        grads = zip((dx, du, dv), needs[:3], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def xielu_autograd(x, u, v, beta=0.5):
    return XIELU.apply(x, u, v, beta)
