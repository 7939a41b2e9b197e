"""RMS norm whose statistic comes from the first features of a row alone, while all of them are scaled.

Forward    r = (mean of x_c^2 over c < p + eps)^(-1/2),   y_c = x_c r w_c for all c
Backward   with g_c = dy_c w_c:  r depends on the first p features only, dr/dx_c = -r^3 x_c / p there:
           dx_c = r g_c - [c < p] x_c r^3 / p sum_{all c} g_c x_c,   dw_c = sum over rows of dy_c x_c r

Forward schedule: a program owns a row in one tile; the statistic reads the lanes below p. r is saved.
Backward schedule: G programs walk the rows pid, pid + G, ... The two sets of lanes are easy to confuse: the
sum <g, x> runs over all features, as each was scaled by r, but only the first p moved r, so only they are
corrected. dw stays in registers over a program's rows; a second kernel adds the G parts.

op: partial_rms_norm
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
def partial_rms_norm_kernel(x_ptr, w_ptr, y_ptr, r_ptr, N, p, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(tl.where(cols < p, x * x, 0.0), axis=0) / p + eps)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * N + cols, (x * r * w).to(y_ptr.dtype.element_ty), mask=cols < N)


def partial_rms_norm_forward(x, w, p, eps):
    N = x.shape[-1]
    if not 1 <= p <= N or N > 32768:
        raise ValueError(f"{p} of {N} features: need 1 to N, and N at most 32768")
    y = torch.empty_like(x)
    r = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    partial_rms_norm_kernel[(r.numel(),)](x, w, y, r, N, p, eps, BLOCK=triton.next_power_of_2(N))
    return y, r


@autodiff(inputs_require_grad=(0, 1))
def partial_rms_norm(x, w, p, eps=1e-6):
    """x: (..., N); w: (N); p: how many features, from the first, make the statistic."""
    return partial_rms_norm_forward(x.contiguous(), w.contiguous(), p, eps)[0]


def reference(x, w, p, eps=1e-6):
    return x * torch.rsqrt(x[..., :p].pow(2).mean(-1, keepdim=True) + eps) * w


SWEEP = [{"M": 16384, "N": 4096, "p": 256}, {"M": 8191, "N": 1000, "p": 125}]
SWEEP_CPU = [{"M": 30, "N": 50, "p": 13}, {"M": 150, "N": 9, "p": 8}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype), dims["p"]


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def partial_rms_norm_backward_kernel(
    x_ptr, w_ptr, r_ptr, dy_ptr, dx_ptr, part_ptr, M, N, p, G, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        r = tl.load(r_ptr + row)
        xhat = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32) * r
        dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        g = dy * w
        moved = tl.sum(g * xhat, axis=0) / p
        dx = r * (g - tl.where(cols < p, xhat * moved, 0.0))
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * xhat
    tl.store(part_ptr + pid * N + cols, dw, mask=mask)


@triton.jit
def weight_sum_kernel(part_ptr, dw_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        dw += tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < N)


class PartialRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, p, eps):
        x, w = x.contiguous(), w.contiguous()
        y, r = partial_rms_norm_forward(x, w, p, eps)
        ctx.save_for_backward(x, w, r)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        M, N = r.numel(), x.shape[-1]
        G = min(M, MAX_GROUPS)
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(N)
        partial_rms_norm_backward_kernel[(G,)](
            x, w, r, dy.contiguous(), dx, part, M, N, ctx.p, G, BLOCK=BLOCK
        )
        needs = ctx.needs_input_grad
        if needs[1]:
            weight_sum_kernel[(triton.cdiv(N, 64),)](part, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        return dx if needs[0] else None, dw if needs[1] else None, None, None


def partial_rms_norm_autograd(x, w, p, eps=1e-6):
    return PartialRMSNorm.apply(x, w, p, eps)
