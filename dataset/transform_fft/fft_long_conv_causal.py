"""Causal convolution with a filter as long as the sequence, by Fourier transforms (Hyena, S4 and their kin).

Forward    y_bct = sum_{s <= t} k_cs x_bc,t-s;  with zeros up to N >= 2 T - 1 no place wraps around, and
           Y = K X for the spectra
Backward   the adjoint of a convolution is a correlation, whose spectra have one factor conjugated:
           dX = conj(K) dY,   dK = sum_b conj(X_b) dY_b,   both cut to the first T places

Forward schedule: a program owns a channel; the filter's spectrum stays in registers while the batch passes
by. k is real, so two sequences travel as real and imaginary part of one transform. A transform is log2 N
equal stages in registers, each of which takes the two halves and interleaves the results: places in the
spectrum come out in another order, which no product minds, and the inverse undoes the stages one by one.
Backward schedule: the channel keeps its owner, and the sum over the batch stays a sum of spectra in
registers: dk costs one inverse transform a channel, not one a sequence, and no partials. x and dy are
transformed once each, dy's spectrum serves both gradients. The pairing holds for dk too: the real part of
conj(X_1 + i X_2)(dY_1 + i dY_2), back in time, is the sum of both sequences' correlations.

op: long_conv
schedule: recompute_from_stats, swap_owner
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def twiddle(stage, N: tl.constexpr):
    j = (tl.arange(0, N // 2) >> stage) << stage
    angle = j.to(tl.float32) * (-6.283185307179586 / N)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def halves(x, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, [2, N // 2]), [1, 0]))


@triton.jit
def join_halves(a, b, N: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), [1, 0]), [N])


@triton.jit
def spectrum(re, im, N: tl.constexpr, STAGES: tl.constexpr):
    for stage in range(STAGES):
        c, s = twiddle(stage, N)
        a_re, b_re = halves(re, N)
        a_im, b_im = halves(im, N)
        d_re, d_im = a_re - b_re, a_im - b_im
        re = tl.reshape(tl.join(a_re + b_re, d_re * c - d_im * s), [N])
        im = tl.reshape(tl.join(a_im + b_im, d_re * s + d_im * c), [N])
    return re, im


@triton.jit
def signal(re, im, N: tl.constexpr, STAGES: tl.constexpr):
    """The inverse of spectrum()."""
    for step in range(STAGES):
        c, s = twiddle(STAGES - 1 - step, N)
        a_re, d_re = tl.split(tl.reshape(re, [N // 2, 2]))
        a_im, d_im = tl.split(tl.reshape(im, [N // 2, 2]))
        b_re, b_im = d_re * c + d_im * s, d_im * c - d_re * s
        re = join_halves(a_re + b_re, a_re - b_re, N)
        im = join_halves(a_im + b_im, a_im - b_im, N)
    return re * (1.0 / N), im * (1.0 / N)


@triton.jit
def load_pair(ptr, b, c, B, C, T, N: tl.constexpr):
    """Sequences b and b + 1 of channel c, and zeros."""
    t = tl.arange(0, N)
    row = b * C + c.to(tl.int64)
    re = tl.load(ptr + row * T + t, mask=t < T, other=0.0).to(tl.float32)
    im = tl.load(ptr + (row + C) * T + t, mask=(t < T) & (b + 1 < B), other=0.0).to(tl.float32)
    return re, im


@triton.jit
def store_pair(ptr, re, im, b, c, B, C, T, N: tl.constexpr):
    t = tl.arange(0, N)
    row = b * C + c.to(tl.int64)
    tl.store(ptr + row * T + t, re.to(ptr.dtype.element_ty), mask=t < T)
    tl.store(ptr + (row + C) * T + t, im.to(ptr.dtype.element_ty), mask=(t < T) & (b + 1 < B))


@triton.jit
def long_conv_kernel(x_ptr, k_ptr, y_ptr, B, C, T, N: tl.constexpr, STAGES: tl.constexpr):
    c = tl.program_id(0)
    t = tl.arange(0, N)
    k = tl.load(k_ptr + c.to(tl.int64) * T + t, mask=t < T, other=0.0).to(tl.float32)
    k_re, k_im = spectrum(k, tl.zeros([N], dtype=tl.float32), N, STAGES)
    for pair in range(tl.cdiv(B, 2)):
        b = pair * 2
        x_re, x_im = load_pair(x_ptr, b, c, B, C, T, N)
        x_re, x_im = spectrum(x_re, x_im, N, STAGES)
        y_re, y_im = signal(k_re * x_re - k_im * x_im, k_re * x_im + k_im * x_re, N, STAGES)
        store_pair(y_ptr, y_re, y_im, b, c, B, C, T, N)


def tiling(x, k):
    if x.shape[1:] != k.shape:
        raise ValueError("need x (B, C, T) and k (C, T)")
    T = x.shape[2]
    if not 1 <= T <= 2048:
        raise ValueError(f"sequences of {T}: they must fit a tile, so have 1 to 2048 places")
    N = max(4, 2 * triton.next_power_of_2(T))
    return {"N": N, "STAGES": N.bit_length() - 1, "num_warps": min(16, max(4, N // 256))}


@autodiff(inputs_require_grad=(0, 1))
def long_conv(x, k):
    """x: (B, C, T); k: (C, T), a filter a channel."""
    x, k, tiles = x.contiguous(), k.contiguous(), tiling(x, k)
    B, C, T = x.shape
    y = torch.empty_like(x)
    long_conv_kernel[(C,)](x, k, y, B, C, T, **tiles)
    return y


def reference(x, k):
    T = x.shape[2]
    spectra = torch.fft.rfft(x, n=2 * T) * torch.fft.rfft(k, n=2 * T)
    return torch.fft.irfft(spectra, n=2 * T)[..., :T]


SWEEP = [{"B": 8, "C": 2048, "T": 2048}, {"B": 5, "C": 1021, "T": 1000}]
SWEEP_CPU = [{"B": 3, "C": 4, "T": 13}, {"B": 2, "C": 3, "T": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, C, T = dims["B"], dims["C"], dims["T"]
    decay = torch.exp(-4 * torch.arange(T, device=device) / max(1, T)).to(dtype)
    k = torch.randn(C, T, device=device, dtype=dtype) * decay
    return torch.randn(B, C, T, device=device, dtype=dtype), k


# ---- backward ----


@triton.jit
def long_conv_backward_kernel(
    x_ptr, k_ptr, dy_ptr, dx_ptr, dk_ptr, B, C, T, N: tl.constexpr, STAGES: tl.constexpr
):
    c = tl.program_id(0)
    t = tl.arange(0, N)
    k = tl.load(k_ptr + c.to(tl.int64) * T + t, mask=t < T, other=0.0).to(tl.float32)
    k_re, k_im = spectrum(k, tl.zeros([N], dtype=tl.float32), N, STAGES)
    dk_re = tl.zeros([N], dtype=tl.float32)
    dk_im = tl.zeros([N], dtype=tl.float32)
    for pair in range(tl.cdiv(B, 2)):
        b = pair * 2
        dy_re, dy_im = load_pair(dy_ptr, b, c, B, C, T, N)
        dy_re, dy_im = spectrum(dy_re, dy_im, N, STAGES)
        dx_re, dx_im = signal(k_re * dy_re + k_im * dy_im, k_re * dy_im - k_im * dy_re, N, STAGES)
        store_pair(dx_ptr, dx_re, dx_im, b, c, B, C, T, N)
        x_re, x_im = load_pair(x_ptr, b, c, B, C, T, N)
        x_re, x_im = spectrum(x_re, x_im, N, STAGES)
        dk_re += x_re * dy_re + x_im * dy_im
        dk_im += x_re * dy_im - x_im * dy_re
    dk, _ = signal(dk_re, dk_im, N, STAGES)
    tl.store(dk_ptr + c.to(tl.int64) * T + t, dk.to(dk_ptr.dtype.element_ty), mask=t < T)


class LongConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        x, k = x.contiguous(), k.contiguous()
        ctx.save_for_backward(x, k)
        return long_conv(x, k)

    @staticmethod
    def backward(ctx, dy):
        x, k = ctx.saved_tensors
        B, C, T = x.shape
        dx, dk = torch.empty_like(x), torch.empty_like(k)
        long_conv_backward_kernel[(C,)](x, k, dy.contiguous(), dx, dk, B, C, T, **tiling(x, k))
        return dx if ctx.needs_input_grad[0] else None, dk if ctx.needs_input_grad[1] else None


def long_conv_autograd(x, k):
    return LongConv.apply(x, k)
