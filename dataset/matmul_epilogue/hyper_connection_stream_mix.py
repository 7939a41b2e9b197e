"""Hyper-connections: the residual is n streams, mixed a token by a small matrix, and a layer's output added.

Forward    y_s = sum_t h_st x_t + p_s f,  s and t of the n streams of one token, x_t and f rows of C
Backward   dx_t = sum_s h_st dy_s,  df = sum_s p_s dy_s,  dh_st = <dy_s, x_t>,  dp_s = <dy_s, f>

Forward schedule: a program owns (token, tile of channels) and has all streams of it in registers. A product
of 4 by 4 is no work for a tensor core; it is a sum along one of three axes, and memory is the limit.
Backward schedule: everything of a token stays with the token, so nothing is split, shared or added up later.
dx and df are pointwise along the channels, dh and dp sums over them: the owner of a token walks its
channels once, stores dx and df tile by tile, adds to the n^2 + n products, and stores those at the end. x, f
and dy are read once, which is all that a backward of this layer can hope for.

op: hyper_connection
schedule: row_reduce_correct, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_streams(ptr, s, c, n, C):
    """The rows s of one token, at channels c, in float32."""
    mask = (s[:, None] < n) & (c[None, :] < C)
    return tl.load(ptr + s[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_mix(h_ptr, p_ptr, s, n):
    h = tl.load(h_ptr + s[:, None] * n + s[None, :], mask=(s[:, None] < n) & (s[None, :] < n), other=0.0)
    return h.to(tl.float32), tl.load(p_ptr + s, mask=s < n, other=0.0).to(tl.float32)


@triton.jit
def mix_kernel(x_ptr, f_ptr, h_ptr, p_ptr, y_ptr, n, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    h, p = load_mix(h_ptr + token * n * n, p_ptr + token * n, s, n)
    x = load_streams(x_ptr + token * n * C, s, c, n, C)
    f = tl.load(f_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    y = tl.sum(h[:, :, None] * x[None, :, :], axis=1) + p[:, None] * f[None, :]
    y_ptrs = y_ptr + token * n * C + s[:, None] * C + c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(s[:, None] < n) & (c[None, :] < C))


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def mix_streams(x, f, h, p):
    """x: (T, n, C), n at most 16; f: (T, C); h: (T, n, n); p: (T, n); gives (T, n, C)."""
    T, n, C = x.shape
    if n > 16 or f.shape != (T, C) or h.shape != (T, n, n) or p.shape != (T, n):
        raise ValueError(f"{n} streams (at most 16) {tuple(x.shape)} do not fit the shapes of f, h and p")
    x, f, h, p = x.contiguous(), f.contiguous(), h.contiguous(), p.contiguous()
    y = torch.empty_like(x)
    blocks = {"BLOCK_N": triton.next_power_of_2(max(1, n)), "BLOCK_C": 128}
    mix_kernel[(T, triton.cdiv(C, 128))](x, f, h, p, y, n, C, **blocks)
    return y


def reference(x, f, h, p):
    return h @ x + p[:, :, None] * f[:, None, :]


SWEEP = [{"T": 16384, "n": 4, "C": 2048}, {"T": 4093, "n": 3, "C": 1600}]
SWEEP_CPU = [{"T": 23, "n": 4, "C": 70}, {"T": 5, "n": 3, "C": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, n, C = dims["T"], dims["n"], dims["C"]
    x, f = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((T, n, C), (T, C)))
    h = torch.eye(n, device=device, dtype=dtype) + 0.2 * torch.randn(T, n, n, device=device, dtype=dtype)
    return x, f, h, torch.randn(T, n, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def token_kernel(
    x_ptr, f_ptr, h_ptr, p_ptr, dy_ptr, dx_ptr, df_ptr, dh_ptr, dp_ptr, n, C,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_N)
    h, p = load_mix(h_ptr + token * n * n, p_ptr + token * n, s, n)
    dh = tl.zeros([BLOCK_N, BLOCK_N], dtype=tl.float32)
    dp = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x = load_streams(x_ptr + token * n * C, s, c, n, C)
        dy = load_streams(dy_ptr + token * n * C, s, c, n, C)
        f = tl.load(f_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        dx = tl.sum(h[:, :, None] * dy[:, None, :], axis=0)
        dx_ptrs = dx_ptr + token * n * C + s[:, None] * C + c[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=(s[:, None] < n) & (c[None, :] < C))
        df = tl.sum(p[:, None] * dy, axis=0)
        tl.store(df_ptr + token * C + c, df.to(df_ptr.dtype.element_ty), mask=c < C)
        dh += tl.sum(dy[:, None, :] * x[None, :, :], axis=2)
        dp += tl.sum(dy * f[None, :], axis=1)
    dh_ptrs = dh_ptr + token * n * n + s[:, None] * n + s[None, :]
    tl.store(dh_ptrs, dh.to(dh_ptr.dtype.element_ty), mask=(s[:, None] < n) & (s[None, :] < n))
    tl.store(dp_ptr + token * n + s, dp.to(dp_ptr.dtype.element_ty), mask=s < n)


class MixStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, h, p):
        x, f, h, p = x.contiguous(), f.contiguous(), h.contiguous(), p.contiguous()
        ctx.save_for_backward(x, f, h, p)
        return mix_streams(x, f, h, p)

    @staticmethod
    def backward(ctx, dy):
        inputs = ctx.saved_tensors
        T, n, C = dy.shape
        grads = [torch.empty_like(tensor) for tensor in inputs]
        blocks = {"BLOCK_N": triton.next_power_of_2(max(1, n)), "BLOCK_C": 128}
        token_kernel[(T,)](*inputs, dy.contiguous(), *grads, n, C, **blocks)
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=True))


def mix_streams_autograd(x, f, h, p):
    return MixStreams.apply(x, f, h, p)
