"""RMS norm, then a gate: what stands before the output projection of a gated state-space or retention layer.

Forward    xhat = x r,  r = (mean x^2 + eps)^(-1/2),  q = silu(z) = z s,  s = sigmoid(z),  y = xhat w q
Backward   with g = dy w q:  dx = r (g - xhat mean(g xhat));
           dz = dy xhat w silu'(z),  silu'(z) = s (1 + z (1 - s));  dw = sum over rows of dy xhat q

Forward schedule: a program owns a row of x and z; r is saved, one number a row.
Backward schedule: G programs walk the rows pid, pid + G, ... The gate and the norm meet in the product alone,
so the owner of a row has all of it in registers: from x, z, dy and r it rebuilds xhat and q, reduces one
number, and stores dx and dz. Unfused, the normalised row would be stored for the gate's backward and its
gradient stored for the norm's. dw stays in registers over a program's rows; a second kernel adds the G parts.

op: gated_rms_norm
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
def gated_rms_norm_kernel(x_ptr, z_ptr, w_ptr, y_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    y = x * r * w * z * tl.sigmoid(z)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm_forward(x, z, w, eps):
    if x.shape != z.shape:
        raise ValueError("x and z must have one shape")
    N = x.shape[-1]
    if N > 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    r = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    gated_rms_norm_kernel[(r.numel(),)](x, z, w, y, r, N, eps, BLOCK=triton.next_power_of_2(N))
    return y, r


@autodiff(inputs_require_grad=(0, 1, 2))
def gated_rms_norm(x, z, w, eps=1e-5):
    """x, z: (..., N); w: (N)."""
    return gated_rms_norm_forward(x.contiguous(), z.contiguous(), w.contiguous(), eps)[0]


def reference(x, z, w, eps=1e-5):
    xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return xhat * w * torch.nn.functional.silu(z)


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4099, "N": 1536}]
SWEEP_CPU = [{"M": 31, "N": 56}, {"M": 150, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, z = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, z, 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def gated_rms_norm_backward_kernel(
    x_ptr, z_ptr, w_ptr, r_ptr, dy_ptr, dx_ptr, dz_ptr, part_ptr, M, N, G, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        r = tl.load(r_ptr + row)
        xhat = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) * r
        z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(z)
        gated = dy * z * s
        g = gated * w
        dx = r * (g - xhat * (tl.sum(g * xhat, axis=0) / N))
        dz = dy * xhat * w * s * (1 + z * (1 - s))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        dw += gated * xhat
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


class GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, w, eps):
        x, z, w = x.contiguous(), z.contiguous(), w.contiguous()
        y, r = gated_rms_norm_forward(x, z, w, eps)
        ctx.save_for_backward(x, z, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, z, w, r = ctx.saved_tensors
        M, N = r.numel(), x.shape[-1]
        G = min(M, MAX_GROUPS)
        dx, dz, dw = torch.empty_like(x), torch.empty_like(z), torch.empty_like(w)
        part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(N)
        gated_rms_norm_backward_kernel[(G,)](x, z, w, r, dy.contiguous(), dx, dz, part, M, N, G, BLOCK=BLOCK)
        needs = ctx.needs_input_grad
        if needs[2]:
            weight_sum_kernel[(triton.cdiv(N, 64),)](part, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        return dx if needs[0] else None, dz if needs[1] else None, dw if needs[2] else None, None


def gated_rms_norm_autograd(x, z, w, eps=1e-5):
    return GatedRMSNorm.apply(x, z, w, eps)
