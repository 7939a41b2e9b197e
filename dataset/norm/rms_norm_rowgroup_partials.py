"""RMS norm with a learned scale.

Forward    xhat = x r,  r = (mean_j x_j^2 + eps)^(-1/2),  y = xhat * w
Backward   with g = dy * w:  dr/dx_j = -r^3 x_j / N, so dx = r (g - xhat mean(g * xhat)),
           dw_j = sum_rows dy_j xhat_j

Forward schedule: a program owns a row and saves r.
Backward schedule: the owner of a row reduces mean(g * xhat) and corrects. dw crosses rows: G programs each
walk the rows pid, pid + G, ... and keep a private dw row in registers, stored once; a second kernel sums
the [G, N] buffer by columns. x and dy are read once, there are no atomics, and the result does not depend
on the order of execution.

op: rms_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * N + cols, x * r * w, mask=mask)


def rms_norm_forward(x, w, eps):
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    r = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    rms_norm_kernel[(r.numel(),)](x, w, y, r, N, eps, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16)
    return y, r


@autodiff(inputs_require_grad=(0, 1))
def rms_norm(x, w, eps=1e-6):
    return rms_norm_forward(x.contiguous(), w.contiguous(), eps)[0]


def reference(x, w, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4096, "N": 8192}, {"M": 32768, "N": 768}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 45, "N": 100}, {"M": 150, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype)
    return x, w


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def rms_norm_backward_kernel(x_ptr, w_ptr, r_ptr, dy_ptr, dx_ptr, part_ptr, M, N, G, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        r = tl.load(r_ptr + row)
        xhat = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) * r
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        g = dy * w
        c = tl.sum(g * xhat, axis=0) / N
        tl.store(dx_ptr + offs, r * (g - xhat * c), mask=mask)
        dw += dy * xhat
    tl.store(part_ptr + pid * N + cols, dw, mask=mask)


@triton.jit
def column_sum_kernel(part_ptr, out_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        total += tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x, w = x.contiguous(), w.contiguous()
        y, r = rms_norm_forward(x, w, eps)
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = r.numel(), x.shape[-1]
        G = min(M, MAX_GROUPS)
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(N)
        rms_norm_backward_kernel[(G,)](
            x, w, r, dy, dx, part, M, N, G, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16
        )
        column_sum_kernel[(triton.cdiv(N, 64),)](part, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None


def rms_norm_autograd(x, w, eps=1e-6):
    return RMSNorm.apply(x, w, eps)
