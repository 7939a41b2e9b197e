"""Residual addition fused with RMS norm; the sum is a second output, for the next layer's residual.

Forward    h = x + res,  y = h r * w,  r = (mean h^2 + eps)^(-1/2);  returns y, h
Backward   with xhat = h r, g = dy * w:  dsum = r (g - xhat mean(g * xhat)) + dh;  dx = dres = dsum;
           dw = sum over rows of dy * xhat

Forward schedule: a program owns a row and writes both outputs; r is saved.
Backward schedule: G programs each walk a strided set of rows. The gradient that comes back through h is
added before the one store, so the two routes into x never meet in memory. x and res get the same values in
two tensors, since two gradients must not share storage. dw is kept in registers over the rows of a program,
then [G, N] partials are summed by columns.

op: add_rms_norm
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
def add_rms_norm_kernel(x_ptr, res_ptr, w_ptr, y_ptr, h_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    h = x + tl.load(res_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    h = h.to(h_ptr.dtype.element_ty).to(tl.float32)  # the norm sees what the next layer will see
    r = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
    tl.store(r_ptr + row, r)
    tl.store(h_ptr + row * N + cols, h, mask=mask)
    tl.store(y_ptr + row * N + cols, h * r * w, mask=mask)


def add_rms_norm_forward(x, res, w, eps):
    if x.shape != res.shape:
        raise ValueError("x and res must have one shape")
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, h = torch.empty_like(x), torch.empty_like(x)
    r = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    warps = 4 if BLOCK <= 2048 else 16
    add_rms_norm_kernel[(r.numel(),)](x, res, w, y, h, r, N, eps, BLOCK=BLOCK, num_warps=warps)
    return y, h, r


@autodiff(inputs_require_grad=(0, 1, 2))
def add_rms_norm(x, res, w, eps=1e-6):
    return add_rms_norm_forward(x.contiguous(), res.contiguous(), w.contiguous(), eps)[:2]


def reference(x, res, w, eps=1e-6):
    h = x + res
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * w, h


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4096, "N": 8192}, {"M": 32768, "N": 768}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 33, "N": 72}, {"M": 140, "N": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, res = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, res, 1 + 0.2 * torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def add_rms_norm_backward_kernel(
    h_ptr, w_ptr, r_ptr, dy_ptr, dh_ptr, dx_ptr, dres_ptr, part_ptr, M, N, G, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        r = tl.load(r_ptr + row)
        xhat = tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32) * r
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        g = dy * w
        dsum = r * (g - xhat * (tl.sum(g * xhat, axis=0) / N))
        dsum += tl.load(dh_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, dsum, mask=mask)
        tl.store(dres_ptr + offs, dsum, mask=mask)
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


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, res, w, eps):
        w = w.contiguous()
        y, h, r = add_rms_norm_forward(x.contiguous(), res.contiguous(), w, eps)
        ctx.save_for_backward(h, w, r)
        return y, h

    @staticmethod
    def backward(ctx, dy, dh):
        h, w, r = ctx.saved_tensors
        dy, dh = dy.contiguous(), dh.contiguous()
        M, N = r.numel(), h.shape[-1]
        G = min(M, MAX_GROUPS)
        dx, dres, dw = torch.empty_like(h), torch.empty_like(h), torch.empty_like(w)
        part = torch.empty((G, N), device=h.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(N)
        add_rms_norm_backward_kernel[(G,)](
            h, w, r, dy, dh, dx, dres, part, M, N, G, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16
        )
        if ctx.needs_input_grad[2]:
            column_sum_kernel[(triton.cdiv(N, 64),)](part, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dres if needs[1] else None, dw if needs[2] else None, None


def add_rms_norm_autograd(x, res, w, eps=1e-6):
    return AddRMSNorm.apply(x, res, w, eps)
