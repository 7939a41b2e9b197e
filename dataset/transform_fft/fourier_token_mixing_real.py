"""Token mixing by a two-dimensional Fourier transform, of which the real part is kept (FNet).

Forward    y = Re(F_T x F_D);  with F = C - i S, C_jk = cos(2 pi j k / n), S_jk = sin(2 pi j k / n):
           u = x C_D,  v = x S_D,   y = C_T u - S_T v
Backward   C and S are symmetric:  dx = C_T dy C_D - S_T dy S_D, which is the forward's map itself

Forward schedule: two launches of products, with the tables made in registers from integers, reduced mod n
before they become angles. The first owns tiles of (tokens, features) and makes u and v from one reading of x;
the second walks the tokens of a sequence and subtracts two products in one accumulator.
Backward schedule: the map is its own adjoint, since each table is its own transpose and the two terms keep
their signs. So the backward is the forward on dy: no saved tensor and no kernel of its own. Taking the
complex transform apart first is what shows it; differentiating fft, then real, would call an inverse
transform of complex numbers of which half are zero.

op: fourier_mixing
schedule: same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling():
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32}


@triton.jit
def tables(j, k, n):
    angle = (j[:, None] * k[None, :] % n).to(tl.float32) * (6.283185307179586 / n)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def feature_kernel(x_ptr, u_ptr, v_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    u = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    v = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = (m[:, None] < M) & (j[None, :] < D)
        x = tl.load(x_ptr + m[:, None] * D + j[None, :], mask=mask, other=0.0).to(tl.float32)
        cos, sin = tables(j, k, D)
        u = tl.dot(x, cos, u, input_precision=PRECISION)
        v = tl.dot(x, sin, v, input_precision=PRECISION)
    mask = (m[:, None] < M) & (k[None, :] < D)
    tl.store(u_ptr + m[:, None] * D + k[None, :], u, mask=mask)
    tl.store(v_ptr + m[:, None] * D + k[None, :], v, mask=mask)


@triton.jit
def token_kernel(u_ptr, v_ptr, y_ptr, T, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(2).to(tl.int64) * T
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = (j[:, None] < T) & (k[None, :] < D)
        offs = (sequence + j[:, None]) * D + k[None, :]
        cos, sin = tables(t, j, T)
        y = tl.dot(cos, tl.load(u_ptr + offs, mask=mask, other=0.0), y, input_precision=PRECISION)
        y = tl.dot(-sin, tl.load(v_ptr + offs, mask=mask, other=0.0), y, input_precision=PRECISION)
    mask = (t[:, None] < T) & (k[None, :] < D)
    offs = (sequence + t[:, None]) * D + k[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def transform(x):
    B, T, D = x.shape
    if max(T, D) > 32768:
        raise ValueError("products of places overflow 32 bits beyond 32768")
    y, tiles = torch.empty_like(x), tiling()
    u, v = (torch.empty((B, T, D), device=x.device, dtype=torch.float32) for _ in range(2))
    feature_kernel[(triton.cdiv(B * T, 32), triton.cdiv(D, 32))](x, u, v, B * T, D, **tiles)
    token_kernel[(triton.cdiv(T, 32), triton.cdiv(D, 32), B)](u, v, y, T, D, **tiles)
    return y


@autodiff(inputs_require_grad=(0,))
def fourier_mixing(x):
    """x: (B, T, D)."""
    return transform(x.contiguous())


def reference(x):
    return torch.fft.fft2(x).real


SWEEP = [{"B": 16, "T": 512, "D": 768}, {"B": 5, "T": 301, "D": 500}]
SWEEP_CPU = [{"B": 2, "T": 19, "D": 24}, {"B": 1, "T": 40, "D": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype),)


# ---- backward ----


class FourierMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return fourier_mixing(x)

    @staticmethod
    def backward(ctx, dy):
        return transform(dy.contiguous())


def fourier_mixing_autograd(x):
    return FourierMixing.apply(x)
