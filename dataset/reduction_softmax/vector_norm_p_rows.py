"""Vector norms of rows: p = 1, 2, infinity, or any other p > 1.

Forward    y = (sum_c |x_c|^p)^(1/p), or max_c |x_c|;  n the first c of the largest |x_c|
Backward   for a row that is not zero
           p = 1:    dx_c = dy sign(x_c)
           p = 2:    dx_c = dy x_c / y
           p = inf:  dx_c = dy sign(x_c) [c = n]
           other:    dx_c = dy sign(x_c) (|x_c| / y)^(p - 1),
           and dx = 0 where y = 0, which the selections in the forward state

Forward schedule: a program owns a row in one tile. Powers are taken of |x_c| / max |x|, so that no p
overflows, and p is a constexpr: each norm is a kernel of its own, without the others' branches.
Backward schedule: the same owner, and no reduction: y has seen the row, and the rest is pointwise. |x_c| / y
is at most 1, so the power is safe. Only for infinity a place is kept, one number a row: comparing |x_c| with
y would find all that are equal.

op: vector_norm
schedule: recompute_from_stats, index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def power(a, p):
    """a^p, 0 for a = 0."""
    return tl.where(a > 0, tl.exp(p * tl.log(tl.where(a > 0, a, 1.0))), 0.0)


@triton.jit
def vector_norm_kernel(x_ptr, y_ptr, n_ptr, N, P: tl.constexpr, INFINITE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    a = tl.where(x > 0, x, tl.where(x < 0, -x, 0.0))  # its derivative at 0 is 0
    if P == 1:
        y = tl.sum(a, axis=0)
    elif INFINITE:
        n = tl.argmax(a, axis=0)
        y = tl.sum(tl.where(cols == n, a, 0.0), axis=0)
        tl.store(n_ptr + row, n)
    else:
        largest = tl.max(a, axis=0)
        some = largest > 0
        scaled = a / tl.where(some, largest, 1.0)
        if P == 2:
            total = tl.sum(scaled * scaled, axis=0)
            root = tl.sqrt(tl.where(some, total, 1.0))
        else:
            root = power(tl.where(some, tl.sum(power(scaled, P), axis=0), 1.0), 1 / P)
        y = tl.where(some, largest * root, 0.0)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty))


def constants(p, N):
    infinite = p == float("inf")
    P = 0.0 if infinite else float(p)
    return {"P": P, "INFINITE": infinite, "BLOCK": triton.next_power_of_2(N)}


def vector_norm_forward(x, p):
    N = x.shape[-1]
    if p < 1 or not 1 <= N <= 32768:
        raise ValueError(f"a {p}-norm of {N} numbers: need p at least 1, and a row that fits one tile")
    y = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    n = torch.empty(x.shape[:-1], device=x.device, dtype=torch.int32)
    vector_norm_kernel[(y.numel(),)](x, y, n, N, **constants(p, N))
    return y, n


@autodiff(inputs_require_grad=(0,))
def vector_norm(x, p=2.0):
    """x: (..., N); gives (...), float32."""
    return vector_norm_forward(x.contiguous(), p)[0]


def reference(x, p=2.0):
    a = x.abs()
    largest = a.amax(-1, keepdim=True).clamp(min=1e-300 if x.dtype == torch.float64 else 1e-38)
    if p == float("inf"):
        return a.max(-1).values
    total = (a / largest).pow(p).sum(-1)
    return largest[..., 0] * torch.where(total > 0, total.clamp(min=0.5).pow(1 / p), 0.0)


SWEEP = [
    {"M": 16384, "N": 4096, "p": 2},
    {"M": 8191, "N": 1000, "p": 1},
    {"M": 8191, "N": 1000, "p": 3},
    {"M": 16384, "N": 2048, "p": 0},
]
SWEEP_CPU = [
    {"M": 24, "N": 45, "p": 2},
    {"M": 24, "N": 45, "p": 1},
    {"M": 33, "N": 9, "p": 3},
    {"M": 33, "N": 9, "p": 0},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return (x,), {"p": float(dims["p"]) if dims["p"] else float("inf")}


# ---- backward ----


@triton.jit
def vector_norm_backward_kernel(
    x_ptr, y_ptr, n_ptr, dy_ptr, dx_ptr, N, P: tl.constexpr, INFINITE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    y, dy = tl.load(y_ptr + row), tl.load(dy_ptr + row)
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    if P == 1:
        dx = dy * sign
    elif INFINITE:
        dx = tl.where(cols == tl.load(n_ptr + row), dy * sign, 0.0)
    else:
        ratio = sign * x / tl.where(y > 0, y, 1.0)
        if P == 2:
            dx = dy * sign * ratio
        else:
            dx = dy * sign * power(ratio, P - 1)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class VectorNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        x = x.contiguous()
        y, n = vector_norm_forward(x, p)
        ctx.save_for_backward(x, y, n)
        ctx.p = float(p)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y, n = ctx.saved_tensors
        N, dx = x.shape[-1], torch.empty_like(x)
        vector_norm_backward_kernel[(y.numel(),)](x, y, n, dy.contiguous(), dx, N, **constants(ctx.p, N))
        return dx, None


def vector_norm_autograd(x, p=2.0):
    return VectorNorm.apply(x, p)
