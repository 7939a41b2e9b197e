"""The seam between two layers of a pre-norm transformer: dropout, stochastic depth, residual and layer norm.

Forward    x' = x m / (1 - p),  m the mask of a seed;   r = s x' + res,  s a number a row (0 drops it);
           xhat = (r - mu) rstd,  y = xhat w + b;   returns y and r, the residual of the next seam
Backward   with g = dy w:  D = dr + rstd (g - mean g - xhat mean(g xhat)), all that arrives at r:
           dres = D,   dx = s D m / (1 - p),   ds = <D, x'>,   dw = sum over rows of dy xhat,   db = of dy

Forward schedule: a program owns a row. The mask is drawn by (seed, place in x) and stored nowhere; mu and
rstd are saved, two numbers a row, and r, which is an output, stands for the sum.
Backward schedule: G programs walk the rows pid, pid + G, ... The two routes into r, through the norm and
around it, are added in registers before any store, so the residual's gradient is written once and is read by
nobody here. The mask is drawn again. The reductions of a row (two means of the norm, the branch's ds) stay
with its owner; dw and db are kept in registers over a program's rows, stored as G parts, and added by a
second kernel.

op: dropout_add_layer_norm
schedule: row_reduce_correct, partials_then_reduce, index_or_seed_replay, recompute_from_stats
difficulty: 4
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def dropped(x, seed, offs, p):
    return tl.where(tl.rand(seed, offs) >= p, x / (1 - p), 0.0)


@triton.jit
def add_norm_kernel(
    x_ptr, res_ptr, s_ptr, w_ptr, b_ptr, y_ptr, r_ptr, mu_ptr, rstd_ptr, N, p, seed, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    offs = row * N + cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    res = tl.load(res_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = dropped(x, seed, offs, p) * tl.load(s_ptr + row).to(tl.float32) + res
    r = r.to(r_ptr.dtype.element_ty).to(tl.float32)  # the norm sees what the next layer will see
    mu = tl.sum(r, axis=0) / N
    centred = tl.where(mask, r - mu, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    tl.store(mu_ptr + row, mu)
    tl.store(rstd_ptr + row, rstd)
    tl.store(r_ptr + offs, r.to(r_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offs, (centred * rstd * w + b).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_mask_kernel(mask_ptr, count, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + offs, dropped(1 - p, seed, offs, p).to(tl.int8), mask=offs < count)


def tile_of(N):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(N)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


def dropout_add_layer_norm_forward(x, res, s, w, b, p, seed, eps):
    if x.shape != res.shape or s.shape != x.shape[:1]:
        raise ValueError(f"x {tuple(x.shape)}, res {tuple(res.shape)} and s {tuple(s.shape)} do not fit")
    M, N = x.shape
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, r = torch.empty_like(x), torch.empty_like(x)
    mu, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    add_norm_kernel[(M,)](x, res, s, w, b, y, r, mu, rstd, N, p, seed, eps, **tile_of(N))
    return y, r, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def dropout_add_layer_norm(x, res, s, w, b, p, seed, eps=1e-5):
    """x, res: (M, N); s: (M), scale of a row's branch; w, b: (N). Returns y and r, (M, N) each."""
    tensors = [t.contiguous() for t in (x, res, s, w, b)]
    return dropout_add_layer_norm_forward(*tensors, p, seed, eps)[:2]


def reference(x, res, s, w, b, p, seed, eps=1e-5):
    mask = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    keep_mask_kernel[(triton.cdiv(x.numel(), 512),)](mask, x.numel(), p, seed, BLOCK=512)
    r = x * mask / (1 - p) * s[:, None] + res
    return torch.nn.functional.layer_norm(r, (x.shape[1],), w, b, eps), r


SWEEP = [{"M": 8192, "N": 4096}, {"M": 16383, "N": 1000}]
SWEEP_CPU = [{"M": 27, "N": 60}, {"M": 140, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x, res = (torch.randn(M, N, device=device, dtype=dtype) for _ in range(2))
    s = 1.25 * (torch.rand(M, device=device) > 0.2).to(dtype)  # a fifth of the branches is dropped
    w = 1 + 0.2 * torch.randn(N, device=device, dtype=dtype)
    return (x, res, s, w, torch.randn(N, device=device, dtype=dtype)), {"p": 0.25, "seed": 11}


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def add_norm_backward_kernel(
    x_ptr, r_ptr, s_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dr_ptr, dx_ptr, dres_ptr, ds_ptr, parts_ptr,
    M, N, G, p, seed, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        r = tl.load(r_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.where(mask, (r - tl.load(mu_ptr + row)) * rstd, 0.0)
        g = dy * w
        total = rstd * (g - tl.sum(g, axis=0) / N - xhat * (tl.sum(g * xhat, axis=0) / N))
        total += tl.load(dr_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dres_ptr + offs, total.to(dres_ptr.dtype.element_ty), mask=mask)
        branch = dropped(tl.where(mask, total, 0.0), seed, offs, p)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row).to(tl.float32)
        tl.store(dx_ptr + offs, (branch * s).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(ds_ptr + row, tl.sum(branch * x, axis=0).to(ds_ptr.dtype.element_ty))
        dw += dy * xhat
        db += dy
    tl.store(parts_ptr + pid * N + cols, dw, mask=mask)
    tl.store(parts_ptr + (G + pid) * N + cols, db, mask=mask)


@triton.jit
def column_sum_kernel(parts_ptr, dw_ptr, db_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (cols[None, :] < N)
        dw += tl.load(parts_ptr + part[:, None] * N + cols[None, :], mask=mask, other=0.0)
        db += tl.load(parts_ptr + (G + part[:, None]) * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)


class DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, res, s, w, b, p, seed, eps):
        x, res, s, w, b = (t.contiguous() for t in (x, res, s, w, b))
        y, r, mu, rstd = dropout_add_layer_norm_forward(x, res, s, w, b, p, seed, eps)
        ctx.save_for_backward(x, r, s, w, mu, rstd)
        ctx.p, ctx.seed, ctx.b_dtype = p, seed, b.dtype
        return y, r

    @staticmethod
    def backward(ctx, dy, dr):
        x, r, s, w, mu, rstd = ctx.saved_tensors
        (M, N), needs = x.shape, ctx.needs_input_grad
        G = min(M, MAX_GROUPS)
        dx, dres, ds, dw = (torch.empty_like(t) for t in (x, x, s, w))
        db = torch.empty_like(w, dtype=ctx.b_dtype)
        parts = torch.empty((2, G, N), device=x.device, dtype=torch.float32)
        add_norm_backward_kernel[(G,)](
            x, r, s, w, mu, rstd, dy.contiguous(), dr.contiguous(), dx, dres, ds, parts,
            M, N, G, ctx.p, ctx.seed, **tile_of(N),
        )  # fmt: skip
        if needs[3] or needs[4]:
            column_sum_kernel[(triton.cdiv(N, 64),)](parts, dw, db, G, N, BLOCK_G=32, BLOCK_N=64)
        grads = (dx, dres, ds, dw, db)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None, None, None


def dropout_add_layer_norm_autograd(x, res, s, w, b, p, seed, eps=1e-5):
    return DropoutAddLayerNorm.apply(x, res, s, w, b, p, seed, eps)
