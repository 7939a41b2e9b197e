"""Batch norm in training: each channel by the mean and variance of its batch, which are outputs too.

Forward    over the K = N P values of channel c:  mu = mean x,  var = mean (x - mu)^2,
           rstd = (var + eps)^(-1/2),  xhat = (x - mu) rstd,  y = xhat w_c + b_c;  returns y, mu, var
Backward   e_c = sum dy,  f_c = sum dy xhat:  db_c = e_c,  dw_c = f_c, and as dmu/dx = 1 / K and
           dvar/dx = 2 (x - mu) / K,
           dx = w_c rstd (dy - (e_c + xhat f_c) / K) + (dmu_c + 2 (x - mu) dvar_c) / K

Forward schedule: a program owns a channel and walks its N P values as one list; a tile's mean and sum of
squares are merged into the running ones (Chan's rule), so one walk gives both without cancellation. A second
walk writes y. The caller makes running averages from mu and var.
Backward schedule: the same owner, two walks. The first makes e and f, which are db and dw, complete: a
channel has one owner, so there are no partials and no third kernel. The second writes dx, which is linear in
dy and x with three constants a channel; the upstreams of mu and var, mostly zero, only change two of those.
This fits where channels are many (C programs run at once); for few the batch would have to be split.

op: batch_norm
schedule: row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(K):
    return min(2048, max(16, triton.next_power_of_2(K)))


@triton.jit
def batch_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, var_ptr, C, P, K, eps, BLOCK: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    mu = 0.0
    squares = 0.0
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (i // P * C + c) * P + i % P, mask=i < K, other=0.0).to(tl.float32)
        count = tl.minimum(BLOCK, K - start).to(tl.float32)
        seen = start + count
        tile_mu = tl.sum(x, axis=0) / count
        centred = tl.where(i < K, x - tile_mu, 0.0)
        step = tile_mu - mu
        squares += tl.sum(centred * centred, axis=0) + step * step * (start * (count / seen))
        mu += step * (count / seen)
    var = squares / K
    tl.store(mu_ptr + c, mu)
    tl.store(var_ptr + c, var)
    scale = tl.rsqrt(var + eps) * tl.load(w_ptr + c).to(tl.float32)
    b = tl.load(b_ptr + c).to(tl.float32)
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // P * C + c) * P + i % P
        x = tl.load(x_ptr + offs, mask=i < K, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, ((x - mu) * scale + b).to(y_ptr.dtype.element_ty), mask=i < K)


@autodiff(inputs_require_grad=(0, 1, 2))
def batch_norm(x, w, b, eps=1e-5):
    """x: (N, C, P), P pixels; w, b: (C). Returns y and the float32 mean and variance (biased), (C) each."""
    x = x.contiguous()
    N, C, P = x.shape
    y = torch.empty_like(x)
    mu, var = (torch.empty(C, device=x.device, dtype=torch.float32) for _ in range(2))
    batch_norm_kernel[(C,)](
        x, w.contiguous(), b.contiguous(), y, mu, var, C, P, N * P, eps, BLOCK=tile_of(N * P)
    )
    return y, mu, var


def reference(x, w, b, eps=1e-5):
    mu = x.mean((0, 2))
    centred = x - mu[:, None]
    var = centred.pow(2).mean((0, 2))
    return centred * (torch.rsqrt(var + eps) * w)[:, None] + b[:, None], mu, var


SWEEP = [{"N": 32, "C": 256, "P": 3136}, {"N": 61, "C": 2048, "P": 49}]
SWEEP_CPU = [{"N": 4, "C": 6, "P": 50}, {"N": 3, "C": 2, "P": 1700}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = 0.5 + 2 * torch.randn(dims["N"], C, dims["P"], device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(C, device=device, dtype=dtype)
    return x, w, torch.randn(C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def batch_norm_backward_kernel(
    x_ptr, w_ptr, mu_ptr, var_ptr, dy_ptr, dmu_ptr, dvar_ptr, dx_ptr, dw_ptr, db_ptr, C, P, K, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    mu = tl.load(mu_ptr + c)
    rstd = tl.rsqrt(tl.load(var_ptr + c) + eps)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    f = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // P * C + c) * P + i % P
        x = tl.load(x_ptr + offs, mask=i < K, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=i < K, other=0.0).to(tl.float32)
        e += dy
        f += dy * (x - mu)
    db = tl.sum(e, axis=0)
    dw = tl.sum(f, axis=0) * rstd
    tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty))
    tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty))
    scale = tl.load(w_ptr + c).to(tl.float32) * rstd
    constant = (tl.load(dmu_ptr + c).to(tl.float32) - scale * db) / K
    slope = (2 * tl.load(dvar_ptr + c).to(tl.float32) - scale * rstd * dw) / K
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (i // P * C + c) * P + i % P
        x = tl.load(x_ptr + offs, mask=i < K, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=i < K, other=0.0).to(tl.float32)
        dx = scale * dy + slope * (x - mu) + constant
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=i < K)


class BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w = x.contiguous(), w.contiguous()
        y, mu, var = batch_norm(x, w, b, eps)
        ctx.save_for_backward(x, w, mu, var)
        ctx.eps, ctx.b_dtype = eps, b.dtype
        return y, mu, var

    @staticmethod
    def backward(ctx, dy, dmu, dvar):
        x, w, mu, var = ctx.saved_tensors
        N, C, P = x.shape
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
        batch_norm_backward_kernel[(C,)](
            x, w, mu, var, dy.contiguous(), dmu.contiguous(), dvar.contiguous(), dx, dw, db,
            C, P, N * P, ctx.eps, BLOCK=tile_of(N * P),
        )  # fmt: skip
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


def batch_norm_autograd(x, w, b, eps=1e-5):
    return BatchNorm.apply(x, w, b, eps)
