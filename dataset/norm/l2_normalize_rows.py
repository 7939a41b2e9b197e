"""Rows scaled to unit length, guarded against zero rows.

Forward    y = x r,  r = 1 / max(|x|, eps)
Backward   where |x| > eps: dr = -r^3 <x, dx>, so dx = r (dy - y <dy, y>), the part of dy orthogonal to y;
           where |x| <= eps the norm is a constant: dx = r dy

Forward schedule: a program owns a row and saves r.
Backward schedule: the row's owner rebuilds y = x r from the saved scalar, reduces <dy, y> once and
corrects. A row in the eps branch is recognised by r = 1 / eps, and drops the projection.

op: l2_norm
schedule: row_reduce_correct, recompute_from_stats
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def l2_normalize_kernel(x_ptr, y_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    r = 1 / tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), eps)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * N + cols, x * r, mask=mask)


def l2_normalize_forward(x, eps):
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    r = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    l2_normalize_kernel[(r.numel(),)](x, y, r, N, eps, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16)
    return y, r


@autodiff(inputs_require_grad=(0,))
def l2_normalize(x, eps=1e-6):
    return l2_normalize_forward(x.contiguous(), eps)[0]


def reference(x, eps=1e-6):
    return x / x.pow(2).sum(-1, keepdim=True).clamp_min(eps * eps).sqrt()


SWEEP = [{"M": 8192, "N": 4096}, {"M": 65536, "N": 768}, {"M": 16384, "N": 1024}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 40, "N": 50}, {"M": 3, "N": 257}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def l2_normalize_backward_kernel(x_ptr, r_ptr, dy_ptr, dx_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    r = tl.load(r_ptr + row)
    y = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32) * r
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    dot = tl.where(r < 1 / eps, tl.sum(dy * y, axis=0), 0.0)
    tl.store(dx_ptr + row * N + cols, r * (dy - y * dot), mask=mask)


class L2Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        x = x.contiguous()
        y, r = l2_normalize_forward(x, eps)
        ctx.save_for_backward(x, r)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        N = x.shape[-1]
        BLOCK = triton.next_power_of_2(N)
        l2_normalize_backward_kernel[(r.numel(),)](
            x, r, dy, dx, N, ctx.eps, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16
        )
        return dx, None


def l2_normalize_autograd(x, eps=1e-6):
    return L2Normalize.apply(x, eps)
