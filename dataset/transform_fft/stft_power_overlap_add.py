"""Power spectrogram of a signal: windowed frames, a discrete Fourier transform, squared magnitudes.

Forward    z_fn = w_n x_{f hop + n},
           R_fk = sum_n z_fn cos(2 pi k n / L),  I_fk = sum_n z_fn sin(2 pi k n / L),
           P_fk = R_fk^2 + I_fk^2  for k = 0 .. L / 2
Backward   dz_fn = sum_k 2 dP_fk (R_fk cos(2 pi k n / L) + I_fk sin(2 pi k n / L)),
           dx_t = sum_f w_{t - f hop} dz_f,t-f hop  over the frames with 0 <= t - f hop < L

Forward schedule: a program owns a tile of frames by frequencies and walks the samples of a frame: two
products with cosines and sines made in registers. Frames overlap in x and are read where they lie, never
copied apart.
Backward schedule: R and I are rebuilt by the forward's products, in place of two saved spectrograms, and 2 dP
R, 2 dP I stored. A second kernel multiplies them with the same tables, transposed, and applies the window:
dz. Frames that overlap would meet in x; the third kernel turns this around, a sample gathers from the ceil(L
/ hop) frames that hold it, so each sample is summed in one register and stored once, without atomics.

op: power_spectrogram
schedule: recompute_from_stats, gather_transpose
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def dot_precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def tables(a, b, L):
    """Cosines and sines of 2 pi a b / L; the angle is reduced while it is an integer."""
    angle = (a[:, None] * b[None, :] % L).to(tl.float32) * (6.283185307179586 / L)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def transform_tile(
    x_ptr, w_ptr, f, k, F, L, hop, PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr
):
    R = tl.zeros([BLOCK_F, BLOCK], dtype=tl.float32)
    I = tl.zeros([BLOCK_F, BLOCK], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = (f[:, None] < F) & (n[None, :] < L)
        w = tl.load(w_ptr + n, mask=n < L, other=0.0)
        z = w[None, :] * tl.load(x_ptr + f[:, None] * hop + n[None, :], mask=mask, other=0.0)
        cos, sin = tables(n, k, L)
        R = tl.dot(z, cos, R, input_precision=PRECISION)
        I = tl.dot(z, sin, I, input_precision=PRECISION)
    return R, I


@triton.jit
def power_kernel(
    x_ptr, w_ptr, p_ptr, T, F, K, L, hop,
    PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    signal = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    R, I = transform_tile(x_ptr + signal * T, w_ptr, f, k, F, L, hop, PRECISION, BLOCK_F, BLOCK)
    mask = (f[:, None] < F) & (k[None, :] < K)
    tl.store(p_ptr + (signal * F + f[:, None]) * K + k[None, :], R * R + I * I, mask=mask)


def sizes(x, w, hop):
    T, L = x.shape[1], w.shape[0]
    if hop < 1 or not 1 <= L <= min(T, 32768):
        raise ValueError(f"frames of {L}, {hop} apart, do not fit a signal of {T}")
    return T, (T - L) // hop + 1, L // 2 + 1, L, hop


def grid_of(B, F, columns):
    return triton.cdiv(F, 32), triton.cdiv(columns, 32), B


@autodiff(inputs_require_grad=(0,))
def power_spectrogram(x, w, hop=12):
    """x: (B, T), signals; w: (L), the window, without a gradient; gives (B, frames, L / 2 + 1); float32."""
    x, w = x.contiguous(), w.contiguous()
    T, F, K, L, hop = sizes(x, w, hop)
    p = torch.empty((x.shape[0], F, K), device=x.device, dtype=x.dtype)
    tiles = {"PRECISION": dot_precision(), "BLOCK_F": 32, "BLOCK": 32}
    power_kernel[grid_of(x.shape[0], F, K)](x, w, p, T, F, K, L, hop, **tiles)
    return p


def reference(x, w, hop=12):
    spectrum = torch.fft.rfft(x.unfold(1, w.shape[0], hop) * w)
    return spectrum.real.pow(2) + spectrum.imag.pow(2)


SWEEP = [{"B": 8, "T": 240000, "L": 512, "hop": 160}, {"B": 3, "T": 99991, "L": 400, "hop": 100}]
SWEEP_CPU = [{"B": 2, "T": 150, "L": 32, "hop": 12}, {"B": 1, "T": 99, "L": 37, "hop": 50}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], device=device, dtype=dtype)
    w = torch.hann_window(dims["L"], device=device, dtype=dtype) + 0.01
    return x, w, dims["hop"]


# ---- backward ----


@triton.jit
def spectrum_gradient_kernel(
    x_ptr, w_ptr, dp_ptr, dr_ptr, di_ptr, T, F, K, L, hop,
    PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    signal = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    R, I = transform_tile(x_ptr + signal * T, w_ptr, f, k, F, L, hop, PRECISION, BLOCK_F, BLOCK)
    mask = (f[:, None] < F) & (k[None, :] < K)
    offs = (signal * F + f[:, None]) * K + k[None, :]
    dp = tl.load(dp_ptr + offs, mask=mask, other=0.0)
    tl.store(dr_ptr + offs, 2 * dp * R, mask=mask)
    tl.store(di_ptr + offs, 2 * dp * I, mask=mask)


@triton.jit
def frame_gradient_kernel(
    dr_ptr, di_ptr, w_ptr, dz_ptr, F, K, L,
    PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    signal = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dz = tl.zeros([BLOCK_F, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (f[:, None] < F) & (k[None, :] < K)
        offs = (signal * F + f[:, None]) * K + k[None, :]
        cos, sin = tables(k, n, L)
        dz = tl.dot(tl.load(dr_ptr + offs, mask=mask, other=0.0), cos, dz, input_precision=PRECISION)
        dz = tl.dot(tl.load(di_ptr + offs, mask=mask, other=0.0), sin, dz, input_precision=PRECISION)
    w = tl.load(w_ptr + n, mask=n < L, other=0.0)
    mask = (f[:, None] < F) & (n[None, :] < L)
    tl.store(dz_ptr + (signal * F + f[:, None]) * L + n[None, :], dz * w[None, :], mask=mask)


@triton.jit
def overlap_add_kernel(dz_ptr, dx_ptr, T, F, L, hop, BLOCK: tl.constexpr):
    signal = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(tl.cdiv(L, hop)):
        f = t // hop - back
        n = t - f * hop
        mask = (t < T) & (f >= 0) & (f < F) & (n < L)
        dx += tl.load(dz_ptr + (signal * F + f) * L + n, mask=mask, other=0.0)
    tl.store(dx_ptr + signal * T + t, dx, mask=t < T)


class PowerSpectrogram(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, hop):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.hop = hop
        return power_spectrogram(x, w, hop)

    @staticmethod
    def backward(ctx, dp):
        x, w = ctx.saved_tensors
        B, dp = x.shape[0], dp.contiguous()
        T, F, K, L, hop = sizes(x, w, ctx.hop)
        dr, di, dx = torch.empty_like(dp), torch.empty_like(dp), torch.empty_like(x)
        dz = torch.empty((B, F, L), device=x.device, dtype=torch.float32)
        tiles = {"PRECISION": dot_precision(), "BLOCK_F": 32, "BLOCK": 32}
        spectrum_gradient_kernel[grid_of(B, F, K)](x, w, dp, dr, di, T, F, K, L, hop, **tiles)
        frame_gradient_kernel[grid_of(B, F, L)](dr, di, w, dz, F, K, L, **tiles)
        overlap_add_kernel[(triton.cdiv(T, 256), B)](dz, dx, T, F, L, hop, BLOCK=256)
        return dx, None, None


def power_spectrogram_autograd(x, w, hop=12):
    return PowerSpectrogram.apply(x, w, hop)
