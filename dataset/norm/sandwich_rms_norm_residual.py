"""Sandwich norm: a layer's result is normalised before the residual is added, and the sum for the next layer.

Forward    fhat = f p,  p = (mean f^2 + eps)^(-1/2);   y = res + fhat v;
           yhat = y r,  r = (mean y^2 + eps)^(-1/2);   z = yhat w;   returns y and z
Backward   with g = dz w:   D = dy + r (g - yhat mean(g yhat)), all that arrives at y:   dres = D,
           with k = D v:   df = p (k - fhat mean(k fhat)),
           dv = sum over rows of D fhat,   dw = sum over rows of dz yhat

Forward schedule: a program owns a row through both norms; p and r are saved, two numbers a row. Separate
kernels would write the normalised result for the addition to read, and the sum for the next norm.
Backward schedule: G programs walk the rows pid, pid + G, ... In a row the two norms are a chain: the second's
correction must be complete, with dy, before the first's begins. Both are reductions over the row that the
program holds, so the chain stays in registers: y and f are read once, dres and df written once, and D is
stored as dres alone. dv and dw are sums of the same shape over all rows and are carried side by side; their G
parts lie in one buffer, rows of 2 N numbers, that a second kernel adds.

op: sandwich_rms_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(N):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(N)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


@triton.jit
def load_row(ptr, row, cols, N):
    return tl.load(ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, row, cols, N):
    tl.store(ptr + row * N + cols, value.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def sandwich_kernel(f_ptr, res_ptr, v_ptr, w_ptr, y_ptr, z_ptr, p_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    f = load_row(f_ptr, row, cols, N)
    p = tl.rsqrt(tl.sum(f * f, axis=0) / N + eps)
    y = load_row(res_ptr, row, cols, N) + f * p * load_row(v_ptr, 0, cols, N)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32)  # the norm sees what the next residual will be
    r = tl.rsqrt(tl.sum(y * y, axis=0) / N + eps)
    tl.store(p_ptr + row, p)
    tl.store(r_ptr + row, r)
    store_row(y_ptr, y, row, cols, N)
    store_row(z_ptr, y * r * load_row(w_ptr, 0, cols, N), row, cols, N)


def sandwich_forward(f, res, v, w, eps):
    M, N = f.shape
    if res.shape != f.shape or v.shape != (N,) or w.shape != (N,):
        raise ValueError(f"f {tuple(f.shape)}, res {tuple(res.shape)} and v {tuple(v.shape)} do not fit")
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, z = torch.empty_like(f), torch.empty_like(f)
    p, r = (torch.empty(M, device=f.device, dtype=torch.float32) for _ in range(2))
    sandwich_kernel[(M,)](f, res, v, w, y, z, p, r, N, eps, **tile_of(N))
    return y, z, p, r


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def sandwich_rms_norm(f, res, v, w, eps=1e-6):
    """f, res: (M, N), a layer's result and its residual; v, w: (N). Returns y and z, (M, N) each."""
    f, res, v, w = f.contiguous(), res.contiguous(), v.contiguous(), w.contiguous()
    return sandwich_forward(f, res, v, w, eps)[:2]


def reference(f, res, v, w, eps=1e-6):
    y = res + f * torch.rsqrt(f.pow(2).mean(1, keepdim=True) + eps) * v
    return y, y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + eps) * w


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4099, "N": 2300}]
SWEEP_CPU = [{"M": 27, "N": 60}, {"M": 135, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    f, res = (torch.randn(M, N, device=device, dtype=dtype) for _ in range(2))
    v, w = (1 + 0.2 * torch.randn(N, device=device, dtype=dtype) for _ in range(2))
    return f, res, v, w


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def sandwich_backward_kernel(
    f_ptr, y_ptr, v_ptr, w_ptr, p_ptr, r_ptr, dy_ptr, dz_ptr, df_ptr, dres_ptr, parts_ptr, M, N,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid, G = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    v, w = load_row(v_ptr, 0, cols, N), load_row(w_ptr, 0, cols, N)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        p, r = tl.load(p_ptr + row), tl.load(r_ptr + row)
        yhat = load_row(y_ptr, row, cols, N) * r
        dz = load_row(dz_ptr, row, cols, N)
        g = dz * w
        D = load_row(dy_ptr, row, cols, N) + r * (g - yhat * (tl.sum(g * yhat, axis=0) / N))
        store_row(dres_ptr, D, row, cols, N)
        fhat = load_row(f_ptr, row, cols, N) * p
        k = D * v
        store_row(df_ptr, p * (k - fhat * (tl.sum(k * fhat, axis=0) / N)), row, cols, N)
        dv += D * fhat
        dw += dz * yhat
    store_row(parts_ptr, dv, 2 * pid, cols, N)
    store_row(parts_ptr, dw, 2 * pid + 1, cols, N)


@triton.jit
def sum_parts_kernel(parts_ptr, dv_ptr, dw_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (cols[None, :] < 2 * N)
        total += tl.load(parts_ptr + part[:, None] * 2 * N + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0)
    tl.store(dv_ptr + cols, total.to(dv_ptr.dtype.element_ty), mask=cols < N)
    tl.store(dw_ptr + cols - N, total.to(dw_ptr.dtype.element_ty), mask=(cols >= N) & (cols < 2 * N))


class SandwichRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, res, v, w, eps):
        f, v, w = f.contiguous(), v.contiguous(), w.contiguous()
        y, z, p, r = sandwich_forward(f, res.contiguous(), v, w, eps)
        ctx.save_for_backward(f, y, v, w, p, r)
        return y, z

    @staticmethod
    def backward(ctx, dy, dz):
        f, y, v, w, p, r = ctx.saved_tensors
        (M, N), needs = f.shape, ctx.needs_input_grad
        G = min(M, MAX_GROUPS)
        df, dres, dv, dw = (torch.empty_like(t) for t in (f, f, v, w))
        parts = torch.empty((G, 2, N), device=f.device, dtype=torch.float32)
        sandwich_backward_kernel[(G,)](
            f, y, v, w, p, r, dy.contiguous(), dz.contiguous(), df, dres, parts, M, N, **tile_of(N)
        )
        if needs[2] or needs[3]:
            sum_parts_kernel[(triton.cdiv(2 * N, 64),)](parts, dv, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        grads = (df, dres, dv, dw)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None


def sandwich_rms_norm_autograd(f, res, v, w, eps=1e-6):
    return SandwichRMSNorm.apply(f, res, v, w, eps)
