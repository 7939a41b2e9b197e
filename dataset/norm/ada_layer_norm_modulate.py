"""Layer norm modulated by a condition: a scale and a shift for each sample, as in diffusion transformers.

Forward    xhat = (x - mu) rstd over the N channels of a token,  y = xhat (1 + s_b) + t_b
Backward   with g = dy (1 + s_b):  dx = rstd (g - mean g - xhat mean(g xhat));
           ds_b = sum over the tokens of b of dy xhat,  dt_b = sum over the tokens of b of dy

Forward schedule: a program owns a token; mu and rstd are saved, two numbers each.
Backward schedule: two owners. dx needs sums along a token, so the token's program makes it in one read. ds
and dt need sums along the tokens of one sample, so (sample, channel tile) gets a grid of its own, walks that
sample's tokens in tiles of rows by columns with loads that coalesce, rebuilds xhat by one subtraction and
product, and stores each number once. An affine norm sums over the whole batch and has to split it in
partials; here the batch itself splits the sum, and no partials are left to add. The second kernel is skipped
where the condition is frozen.

op: ada_layer_norm
schedule: row_reduce_correct, swap_owner, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def ada_layer_norm_kernel(
    x_ptr, s_ptr, t_ptr, y_ptr, mu_ptr, rstd_ptr, T, N, eps, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b = token // T
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + token * N + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + b * N + cols, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + b * N + cols, mask=mask, other=0.0).to(tl.float32)
    mu = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mu, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    y = centred * rstd * (1 + s) + t
    tl.store(y_ptr + token * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mu_ptr + token, mu)
    tl.store(rstd_ptr + token, rstd)


def ada_layer_norm_forward(x, s, t, eps):
    B, T, N = x.shape
    if N > 32768:
        raise ValueError(f"a token of {N} channels does not fit one tile")
    y = torch.empty_like(x)
    mu, rstd = (torch.empty((B, T), device=x.device, dtype=torch.float32) for _ in range(2))
    ada_layer_norm_kernel[(B * T,)](x, s, t, y, mu, rstd, T, N, eps, BLOCK=triton.next_power_of_2(N))
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def ada_layer_norm(x, s, t, eps=1e-5):
    """x: (B, T, N); s, t: (B, N)."""
    return ada_layer_norm_forward(x.contiguous(), s.contiguous(), t.contiguous(), eps)[0]


def reference(x, s, t, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    xhat = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return xhat * (1 + s[:, None]) + t[:, None]


SWEEP = [{"B": 64, "T": 256, "N": 1152}, {"B": 5, "T": 1025, "N": 3072}]
SWEEP_CPU = [{"B": 3, "T": 19, "N": 64}, {"B": 2, "T": 50, "N": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, N = dims["B"], dims["T"], dims["N"]
    x = 0.5 + 2 * torch.randn(B, T, N, device=device, dtype=dtype)
    s, t = (0.3 * torch.randn(B, N, device=device, dtype=dtype) for _ in range(2))
    return x, s, t


# ---- backward ----


@triton.jit
def token_backward_kernel(
    x_ptr, s_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, T, N, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + token * N + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + token * N + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + token // T * N + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + token)
    xhat = (x - tl.load(mu_ptr + token)) * rstd
    g = dy * (1 + s)  # zero beyond N, as dy is
    dx = rstd * (g - tl.sum(g, axis=0) / N - xhat * (tl.sum(g * xhat, axis=0) / N))
    tl.store(dx_ptr + token * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def condition_backward_kernel(
    x_ptr, mu_ptr, rstd_ptr, dy_ptr, ds_ptr, dt_ptr, T, N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ds = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    dt = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        i = start + tl.arange(0, BLOCK_T)
        mask = (i[:, None] < T) & (cols[None, :] < N)
        offs = (b * T + i[:, None]) * N + cols[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mu = tl.load(mu_ptr + b * T + i, mask=i < T, other=0.0)
        rstd = tl.load(rstd_ptr + b * T + i, mask=i < T, other=0.0)
        ds += dy * (x - mu[:, None]) * rstd[:, None]
        dt += dy
    ds_sum = tl.sum(ds, axis=0).to(ds_ptr.dtype.element_ty)
    dt_sum = tl.sum(dt, axis=0).to(dt_ptr.dtype.element_ty)
    tl.store(ds_ptr + b * N + cols, ds_sum, mask=cols < N)
    tl.store(dt_ptr + b * N + cols, dt_sum, mask=cols < N)


class AdaLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s, t, eps):
        x, s, t = x.contiguous(), s.contiguous(), t.contiguous()
        y, mu, rstd = ada_layer_norm_forward(x, s, t, eps)
        ctx.save_for_backward(x, s, mu, rstd)
        ctx.t_dtype = t.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, s, mu, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        B, T, N = x.shape
        needs = ctx.needs_input_grad
        dx = ds = dt = None
        if needs[0]:
            dx = torch.empty_like(x)
            BLOCK = triton.next_power_of_2(N)
            token_backward_kernel[(B * T,)](x, s, mu, rstd, dy, dx, T, N, BLOCK=BLOCK)
        if needs[1] or needs[2]:
            ds, dt = torch.empty_like(s), torch.empty_like(s, dtype=ctx.t_dtype)
            condition_backward_kernel[(B, triton.cdiv(N, 64))](
                x, mu, rstd, dy, ds, dt, T, N, BLOCK_T=32, BLOCK_N=64
            )
        return dx, ds if needs[1] else None, dt if needs[2] else None, None


def ada_layer_norm_autograd(x, s, t, eps=1e-5):
    return AdaLayerNorm.apply(x, s, t, eps)
