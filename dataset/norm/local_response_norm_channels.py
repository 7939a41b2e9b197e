"""Local response norm: each number divided by a power of the squares in a window of channels around it.

Forward    s_c = k + a sum over d of W_c of x_d^2,   y_c = x_c s_c^(-beta);   W_c: channels c - h to c + h,
           fewer at the borders
Backward   dy_d/dx_c = [d = c] s_c^(-beta) - 2 a beta x_c x_d s_d^(-beta-1) for c in W_d. A window is
           symmetric, c in W_d means d in W_c, so with t_d = dy_d x_d s_d^(-beta-1):
           dx_c = dy_c s_c^(-beta) - 2 a beta x_c sum over d of W_c of t_d

Forward schedule: a program owns a tile of pixels of one channel and gathers the 2 h + 1 channels of its
window; all but one are in cache, from its neighbours. s is kept.
Backward schedule: written per output, each d scatters to its window, and neighbours collide. Seen from c it
is a gather over the same window as forward, with t instead of x^2, so the owners stay: a program rebuilds t
of its window from dy, x and s and adds in registers. t takes a power for each d, and a channel is in 2 h + 1
windows; where that is dear t could be stored first. One store, no atomics.

op: lrn
schedule: gather_transpose, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_plane(ptr, image, c, p, C, P):
    """Pixels p of channel c, 0 for a channel that is not there."""
    mask = (c >= 0) & (c < C) & (p < P)
    return tl.load(ptr + (image * C + c) * P + p, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def lrn_kernel(x_ptr, y_ptr, s_ptr, C, P, h, k, a, beta, BLOCK: tl.constexpr):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(-h, h + 1):
        x = load_plane(x_ptr, image, c + step, p, C, P)
        squares += x * x
    s = k + a * squares
    y = load_plane(x_ptr, image, c, p, C, P) * tl.exp(-beta * tl.log(s))
    offs = (image * C + c) * P + p
    tl.store(s_ptr + offs, s, mask=p < P)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=p < P)


def lrn_forward(x, h, k, a, beta):
    if h < 0 or k <= 0 or a < 0:
        raise ValueError(f"a window of 2 * {h} + 1 channels, k = {k}, a = {a}: s could fail to be above 0")
    N, C, P = x.shape
    y, s = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    lrn_kernel[(triton.cdiv(P, 512), C, N)](x, y, s, C, P, h, k, a, beta, BLOCK=512)
    return y, s


@autodiff(inputs_require_grad=(0,))
def local_response_norm(x, h=2, k=1.0, a=0.1, beta=0.75):
    """x: (N, C, P), P pixels; a window has 2 h + 1 channels."""
    return lrn_forward(x.contiguous(), h, k, a, beta)[0]


def reference(x, h=2, k=1.0, a=0.1, beta=0.75):
    padded = torch.nn.functional.pad(x * x, (0, 0, h, h))
    s = k + a * padded.unfold(1, 2 * h + 1, 1).sum(-1)
    return x * s.pow(-beta)


SWEEP = [{"N": 32, "C": 192, "P": 3025}, {"N": 17, "C": 63, "P": 1000}]
SWEEP_CPU = [{"N": 2, "C": 11, "P": 23}, {"N": 1, "C": 4, "P": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(dims["N"], dims["C"], dims["P"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def lrn_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, C, P, h, a, beta, BLOCK: tl.constexpr):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(-h, h + 1):
        d = c + step
        there = (d >= 0) & (d < C) & (p < P)
        log_s = tl.log(tl.where(there, load_plane(s_ptr, image, d, p, C, P), 1.0))
        t = load_plane(dy_ptr, image, d, p, C, P) * load_plane(x_ptr, image, d, p, C, P)
        total += t * tl.exp(-(beta + 1) * log_s)
    offs = (image * C + c) * P + p
    log_s = tl.log(tl.load(s_ptr + offs, mask=p < P, other=1.0))
    x = load_plane(x_ptr, image, c, p, C, P)
    dx = load_plane(dy_ptr, image, c, p, C, P) * tl.exp(-beta * log_s) - 2 * a * beta * x * total
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=p < P)


class LocalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h, k, a, beta):
        x = x.contiguous()
        y, s = lrn_forward(x, h, k, a, beta)
        ctx.save_for_backward(x, s)
        ctx.constants = (h, a, beta)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        (N, C, P), dx = x.shape, torch.empty_like(x)
        grid = (triton.cdiv(P, 512), C, N)
        lrn_backward_kernel[grid](x, s, dy.contiguous(), dx, C, P, *ctx.constants, BLOCK=512)
        return dx, None, None, None, None


def local_response_norm_autograd(x, h=2, k=1.0, a=0.1, beta=0.75):
    return LocalResponseNorm.apply(x, h, k, a, beta)
