"""Layer norm with scale and shift.

Forward    xhat = (x - mu) rstd,  y = xhat * w + b
Backward   with g = dy * w:  dx = rstd (g - mean(g) - xhat mean(g * xhat)),
           dw = sum_rows dy * xhat,  db = sum_rows dy
           (the means project g on the constant vector and on xhat, the two directions that were removed)

Forward schedule: a program owns a row and saves mu and rstd.
Backward schedule: G programs each walk a strided set of rows. For its row a program reduces the two scalars
and writes dx; for the parameters it keeps a private dw and db row in registers over all its rows and stores
them once, in [G, N] buffers that a small kernel sums by columns. x and dy are read once, the partials are G
/ M of their size, and nothing is atomic.

op: layer_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    mu = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mu, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    tl.store(mu_ptr + row, mu)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + cols, centred * rstd * w + b, mask=mask)


def layer_norm_forward(x, w, b, eps):
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    mu = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mu)
    BLOCK = triton.next_power_of_2(N)
    warps = 4 if BLOCK <= 2048 else 16
    layer_norm_kernel[(mu.numel(),)](x, w, b, y, mu, rstd, N, eps, BLOCK=BLOCK, num_warps=warps)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, w, b, eps=1e-5):
    return layer_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, eps)


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4096, "N": 8192}, {"M": 32768, "N": 768}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 37, "N": 130}, {"M": 150, "N": 48}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 0.5 + 2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype)
    b = torch.randn(dims["N"], device=device, dtype=dtype)
    return x, w, b


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def layer_norm_backward_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_part_ptr, db_part_ptr, M, N, G, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.where(mask, (x - tl.load(mu_ptr + row)) * rstd, 0.0)
        g = dy * w
        c0 = tl.sum(g, axis=0) / N
        c1 = tl.sum(g * xhat, axis=0) / N
        tl.store(dx_ptr + offs, rstd * (g - c0 - xhat * c1), mask=mask)
        dw += dy * xhat
        db += dy
    tl.store(dw_part_ptr + pid * N + cols, dw, mask=mask)
    tl.store(db_part_ptr + pid * N + cols, db, mask=mask)


@triton.jit
def column_sum_kernel(
    dw_part_ptr, db_part_ptr, dw_ptr, db_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        dw += tl.load(dw_part_ptr + offs, mask=mask, other=0.0)
        db += tl.load(db_part_ptr + offs, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0), mask=cols < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = layer_norm_forward(x, w, b, eps)
        ctx.save_for_backward(x, w, mu, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = mu.numel(), x.shape[-1]
        G = min(M, MAX_GROUPS)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
        dw_part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        db_part = torch.empty_like(dw_part)
        BLOCK = triton.next_power_of_2(N)
        warps = 4 if BLOCK <= 2048 else 16
        layer_norm_backward_kernel[(G,)](
            x, w, mu, rstd, dy, dx, dw_part, db_part, M, N, G, BLOCK=BLOCK, num_warps=warps
        )
        column_sum_kernel[(triton.cdiv(N, 64),)](dw_part, db_part, dw, db, G, N, BLOCK_G=32, BLOCK_N=64)
        grads = (dx, dw, db)
        return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)
