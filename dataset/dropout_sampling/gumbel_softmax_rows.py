"""Gumbel-softmax: a relaxed draw of one category from each row.

Forward    g_j = -log(-log u_j), u the Philox stream of a seed;   y = softmax((x + g) / tau)
Backward   dx_j = y_j (dy_j - sum_k y_k dy_k) / tau:  x enters as in any softmax, and g is a constant

Forward schedule: a program owns a row in one tile and draws g for its columns on the way.
Backward schedule: the noise needs no replay at all. It stands beside x, so whatever it did to the result is
in y already; y is what the next layer keeps in any case, and from y the same owner makes one dot over the
row and the correction. The seed, x and g are forgotten. Noise that multiplies would have to be drawn again.

op: gumbel_softmax
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gumbel(seed, offs):
    """Uniform numbers are kept off 0, whose logarithm is not finite."""
    u = tl.maximum(tl.rand(seed, offs), 1e-7)
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel_softmax_kernel(x_ptr, y_ptr, N, tau, seed, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * N + cols
    x = tl.load(x_ptr + offs, mask=cols < N, other=-float("inf")).to(tl.float32)
    s = (x + gumbel(seed, offs)) / tau
    e = tl.exp(s - tl.max(s, axis=0))
    tl.store(y_ptr + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def gumbel_softmax(x, tau, seed):
    """x: (M, N), logits."""
    x, (M, N) = x.contiguous(), x.shape
    if N > 32768 or tau <= 0:
        raise ValueError(f"rows of {N} do not fit one tile, or {tau} is no temperature")
    y = torch.empty_like(x)
    gumbel_softmax_kernel[(M,)](x, y, N, tau, seed, BLOCK=triton.next_power_of_2(N))
    return y


@triton.jit
def noise_kernel(out_ptr, n, seed, BLOCK: tl.constexpr):
    """g alone, for the reference."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, gumbel(seed, offs), mask=offs < n)


def reference(x, tau, seed):
    g = torch.empty(x.shape, device=x.device)
    noise_kernel[(triton.cdiv(g.numel(), 256),)](g, g.numel(), seed, BLOCK=256)
    return torch.softmax((x + g) / tau, dim=-1)


SWEEP = [{"M": 65536, "N": 1024}, {"M": 4099, "N": 8191}]
SWEEP_CPU = [{"M": 25, "N": 19}, {"M": 6, "N": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),), {"tau": 0.7, "seed": 20}


# ---- backward ----


@triton.jit
def gumbel_softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, tau, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * N + cols
    y = tl.load(y_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=0)) / tau
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class GumbelSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tau, seed):
        y = gumbel_softmax(x, tau, seed)
        ctx.save_for_backward(y)
        ctx.tau = tau
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        (M, N), dx = y.shape, torch.empty_like(y)
        BLOCK = triton.next_power_of_2(N)
        gumbel_softmax_backward_kernel[(M,)](y, dy.contiguous(), dx, N, ctx.tau, BLOCK=BLOCK)
        return dx, None, None


def gumbel_softmax_autograd(x, tau, seed):
    return GumbelSoftmax.apply(x, tau, seed)
