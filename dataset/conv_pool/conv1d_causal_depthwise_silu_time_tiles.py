"""Causal depthwise convolution over time, followed by SiLU.

Forward    z_t = b + sum_k w_k x_{t-K+1+k},  y_t = z_t sigmoid(z_t), per channel, with x = 0 before the start
Backward   u_t = dy_t silu'(z_t);  dx_s = sum_k w_k u_{s+K-1-k};
           dw_k = sum_t u_t x_{t-K+1+k};  db = sum_t u_t

Forward schedule: a program owns (batch, time tile, channel tile) and looks K - 1 steps to the left.
Backward schedule: the tap map is static, so the adjoint is a gather: the owner of the same tile of x looks
K - 1 steps to the right at u, which it rebuilds from x and dy (the loads overlap and hit L1, K is small,
and neither z nor u is stored). The same program sums its own u for dw and db over its tile and stores K + 1
rows; a second kernel adds them over batch and time tiles.

op: causal_conv1d
schedule: gather_transpose, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def preactivation(x_ptr, w_ptr, b_ptr, batch, t, cols, T, C, K):
    """z at times t (a column) and channels cols (a row); times outside 0 .. T - 1 are not meaningful."""
    z = tl.zeros([t.shape[0], cols.shape[0]], dtype=tl.float32)
    z += tl.load(b_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    for k in range(K):
        past = t - K + 1 + k
        mask = (past[:, None] >= 0) & (past[:, None] < T) & (cols[None, :] < C)
        x = tl.load(x_ptr + (batch * T + past[:, None]) * C + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        z += x * tl.load(w_ptr + cols * K + k, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def conv_silu_kernel(x_ptr, w_ptr, b_ptr, y_ptr, T, C, K, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    z = preactivation(x_ptr, w_ptr, b_ptr, batch, t, cols, T, C, K)
    mask = (t[:, None] < T) & (cols[None, :] < C)
    tl.store(y_ptr + (batch * T + t[:, None]) * C + cols[None, :], z * tl.sigmoid(z), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def causal_conv_silu(x, w, b):
    """x: (B, T, C); w: (C, K); b: (C)."""
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    B, T, C = x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(T, 16), triton.cdiv(C, 32), B)
    conv_silu_kernel[grid](x, w, b, y, T, C, w.shape[1], BLOCK_T=16, BLOCK_C=32)
    return y


def reference(x, w, b):
    K = w.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, K - 1, 0))
    z = b + sum(w[:, k] * padded[:, k : k + x.shape[1]] for k in range(K))
    return torch.nn.functional.silu(z)


SWEEP = [
    {"B": 4, "T": 4096, "C": 4096, "K": 4},
    {"B": 8, "T": 2048, "C": 5120, "K": 4},
    {"B": 3, "T": 2047, "C": 1537, "K": 3},
]
SWEEP_CPU = [{"B": 2, "T": 37, "C": 25, "K": 4}, {"B": 1, "T": 16, "C": 40, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C, K = dims["B"], dims["T"], dims["C"], dims["K"]
    x = torch.randn(B, T, C, device=device, dtype=dtype)
    return x, torch.randn(C, K, device=device, dtype=dtype), torch.randn(C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def silu_gradient(x_ptr, w_ptr, b_ptr, dy_ptr, batch, t, cols, T, C, K):
    """u at times t, zero outside 0 .. T - 1."""
    z = preactivation(x_ptr, w_ptr, b_ptr, batch, t, cols, T, C, K)
    s = tl.sigmoid(z)
    mask = (t[:, None] < T) & (cols[None, :] < C)
    dy = tl.load(dy_ptr + (batch * T + t[:, None]) * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return dy * s * (1 + z * (1 - s))


@triton.jit
def conv_silu_backward_kernel(
    x_ptr, w_ptr, b_ptr, dy_ptr, dx_ptr, part_ptr, T, C, K, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = (batch * tl.num_programs(0) + tl.program_id(0)) * (K + 1)

    u = silu_gradient(x_ptr, w_ptr, b_ptr, dy_ptr, batch, t, cols, T, C, K)
    tl.store(part_ptr + (row + K) * C + cols, tl.sum(u, axis=0), mask=cols < C)
    for k in range(K):
        past = t - K + 1 + k
        mask = (past[:, None] >= 0) & (past[:, None] < T) & (cols[None, :] < C)
        x = tl.load(x_ptr + (batch * T + past[:, None]) * C + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        tl.store(part_ptr + (row + k) * C + cols, tl.sum(u * x, axis=0), mask=cols < C)

    dx = u * tl.load(w_ptr + cols * K + K - 1, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    for ahead in range(1, K):
        w = tl.load(w_ptr + cols * K + K - 1 - ahead, mask=cols < C, other=0.0).to(tl.float32)
        dx += silu_gradient(x_ptr, w_ptr, b_ptr, dy_ptr, batch, t + ahead, cols, T, C, K) * w[None, :]
    mask = (t[:, None] < T) & (cols[None, :] < C)
    tl.store(dx_ptr + (batch * T + t[:, None]) * C + cols[None, :], dx, mask=mask)


@triton.jit
def column_sum_kernel(part_ptr, out_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        total += tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)


class CausalConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        ctx.save_for_backward(x, w, b)
        return causal_conv_silu(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w, b = ctx.saved_tensors
        dy = dy.contiguous()
        B, T, C = x.shape
        K = w.shape[1]
        tiles = triton.cdiv(T, 16)
        dx = torch.empty_like(x)
        part = torch.empty((B * tiles, K + 1, C), device=x.device, dtype=torch.float32)
        conv_silu_backward_kernel[(tiles, triton.cdiv(C, 32), B)](
            x, w, b, dy, dx, part, T, C, K, BLOCK_T=16, BLOCK_C=32
        )
        sums = torch.empty((K + 1, C), device=x.device, dtype=torch.float32)
        column_sum_kernel[(triton.cdiv(sums.numel(), 64),)](
            part, sums, B * tiles, sums.numel(), BLOCK_G=16, BLOCK_N=64
        )
        grads = dx, sums[:K].t().to(w.dtype).contiguous(), sums[K].to(b.dtype, copy=True)
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def causal_conv_silu_autograd(x, w, b):
    return CausalConvSilu.apply(x, w, b)
