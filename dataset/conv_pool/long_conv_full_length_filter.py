"""Causal convolution with a filter as long as the sequence, one for each channel: Hyena, S4 in its long form.

Forward    y[b, c, t] = sum_{l <= t} k[c, l] x[b, c, t - l]
Backward   dx[b, c, s] = sum_{t >= s} k[c, t - s] dy[b, c, t];
           dk[c, l] = sum_b sum_{t >= l} dy[b, c, t] x[b, c, t - l]

Forward schedule: for one channel the sum is Y = X K with the Toeplitz matrix K[s, t] = k[t - s], the same for
the whole batch. A program owns (channel, tile of the batch, tile of times) and walks the earlier times; it
gathers a tile of K out of the 2 BLOCK - 1 numbers that it holds, which come from cache, and multiplies with
it the batch as the rows of a dot. Batches below 16 are padded.
Backward schedule: dx is the same program with K transposed, so it walks the later times. The filter's owner
is (channel, tile of lags): it would have to reduce the diagonals of X^T dY, which no dot does, so it makes
the Toeplitz tile of x instead, times by lags, for one sequence at a time, and reduces its product with dy.
The channels give enough programs for that, and every gradient has one owner, no transform and no buffer of
twice the length.

op: long_conv
schedule: gather_transpose, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_B": 16, "BLOCK_T": 64}


@triton.jit
def load_times(ptr, b, c, t, B, C, T):
    """The batch's rows of one channel; times outside are 0."""
    mask = (b[:, None] < B) & (t[None, :] < T)
    return tl.load(ptr + (b[:, None].to(tl.int64) * C + c) * T + t[None, :], mask=mask, other=0.0)


@triton.jit
def load_lags(ptr, lag, T):
    """The filter at a tile of lags; before the first it is 0."""
    return tl.load(ptr + lag, mask=(lag >= 0) & (lag < T), other=0.0)


@triton.jit
def long_conv_kernel(
    x_ptr, k_ptr, y_ptr, B, C, T, REVERSED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over s of k[t - s] x[s], and with REVERSED of k[s - t] x[s]."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    first = tl.program_id(2) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    begin = first if REVERSED else 0
    end = T if REVERSED else first + BLOCK_T
    y = tl.zeros([BLOCK_B, BLOCK_T], dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        s = start + tl.arange(0, BLOCK_T)
        lag = t[None, :] - s[:, None]
        toeplitz = load_lags(k_ptr + c * T, -lag if REVERSED else lag, T)
        y = tl.dot(load_times(x_ptr, b, c, s, B, C, T), toeplitz, y, input_precision=PRECISION)
    mask = (b[:, None] < B) & (t[None, :] < T)
    offs = (b[:, None].to(tl.int64) * C + c) * T + t[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def convolve(x, k, reverse):
    (B, C, T), tiles = x.shape, tiles_of(x)
    y = torch.empty_like(x)
    grid = (C, triton.cdiv(B, tiles["BLOCK_B"]), triton.cdiv(T, tiles["BLOCK_T"]))
    long_conv_kernel[grid](x, k, y, B, C, T, REVERSED=reverse, **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def long_conv(x, k):
    """x: (B, C, T); k: (C, T)."""
    if k.shape != x.shape[1:]:
        raise ValueError(f"filters {tuple(k.shape)} are not as long as {tuple(x.shape)}")
    return convolve(x.contiguous(), k.contiguous(), False)


def reference(x, k):
    T = x.shape[2]
    lag = torch.arange(T, device=x.device) - torch.arange(T, device=x.device)[:, None]
    toeplitz = torch.where(lag >= 0, k[:, lag.clamp(min=0)], 0.0)
    return torch.einsum("bcs,cst->bct", x, toeplitz)


SWEEP = [{"B": 16, "C": 256, "T": 2048}, {"B": 5, "C": 130, "T": 1531}]
SWEEP_CPU = [{"B": 2, "C": 5, "T": 45}, {"B": 3, "C": 2, "T": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Filters that decay, at rates of their own."""
    B, C, T = dims["B"], dims["C"], dims["T"]
    x = torch.randn(B, C, T, device=device, dtype=dtype)
    rate = 5 * torch.rand(C, 1, device=device) / max(1, T)
    decay = torch.exp(-rate * torch.arange(T, device=device))
    return x, torch.randn(C, T, device=device, dtype=dtype) * decay.to(dtype) / max(1, T) ** 0.5


# ---- backward ----


@triton.jit
def filter_kernel(x_ptr, dy_ptr, dk_ptr, B, C, T, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr):
    c = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_L
    lag = first + tl.arange(0, BLOCK_L)
    dk = tl.zeros([BLOCK_T, BLOCK_L], dtype=tl.float32)
    for b in range(B):
        row = (b * C + c) * T
        for start in range(first, T, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            dy = tl.load(dy_ptr + row + t, mask=t < T, other=0.0).to(tl.float32)
            s = t[:, None] - lag[None, :]
            x = tl.load(x_ptr + row + s, mask=(s >= 0) & (s < T), other=0.0).to(tl.float32)
            dk += dy[:, None] * x
    tl.store(dk_ptr + c * T + lag, tl.sum(dk, axis=0).to(dk_ptr.dtype.element_ty), mask=lag < T)


class LongConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        x, k = x.contiguous(), k.contiguous()
        ctx.save_for_backward(x, k)
        return long_conv(x, k)

    @staticmethod
    def backward(ctx, dy):
        x, k = ctx.saved_tensors
        dy, (B, C, T) = dy.contiguous(), x.shape
        dx = convolve(dy, k, True) if ctx.needs_input_grad[0] else None
        dk = None
        if ctx.needs_input_grad[1]:
            dk = torch.empty_like(k)
            filter_kernel[(C, triton.cdiv(T, 64))](x, dy, dk, B, C, T, BLOCK_L=64, BLOCK_T=32)
        return dx, dk


def long_conv_autograd(x, k):
    return LongConv.apply(x, k)
