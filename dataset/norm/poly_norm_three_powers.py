"""PolyNorm: three powers of a row, each at unit root mean square, mixed by three weights.

Forward    u_q = x^q,  r_q = (mean u_q^2 + eps)^(-1/2),   y = sum_q w_q r_q u_q + b   for q = 1, 2, 3
Backward   with s_q = sum over the row of dy r_q u_q:   du_q = w_q r_q (dy - r_q u_q s_q / N),
           dx = du_1 + 2 x du_2 + 3 x^2 du_3,   dw_q = sum over rows of s_q,   db = sum of all dy

Forward schedule: a program owns a row in one tile; three reductions over numbers that stay in registers. The
three r are saved.
Backward schedule: G programs walk the rows pid, pid + G, ... Three projections share every operand, so a
row's owner rebuilds the powers from x, reduces <dy, x>, <dy, x^2>, <dy, x^3> and sum dy, and has dx. These
four numbers are also all that a row adds to dw and db: parameters that are scalars for a whole row cost
nothing beyond what dx needs, and a program carries four sums over its rows. G parts are added by one program
at the end.

op: poly_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
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
def poly_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, r_ptr, M, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    x2 = x * x
    x3 = x2 * x
    r1 = tl.rsqrt(tl.sum(x2, axis=0) / N + eps)
    r2 = tl.rsqrt(tl.sum(x2 * x2, axis=0) / N + eps)
    r3 = tl.rsqrt(tl.sum(x3 * x3, axis=0) / N + eps)
    w1, w2, w3 = tl.load(w_ptr), tl.load(w_ptr + 1), tl.load(w_ptr + 2)
    y = w1 * r1 * x + w2 * r2 * x2 + w3 * r3 * x3 + tl.load(b_ptr)
    tl.store(r_ptr + row, r1)
    tl.store(r_ptr + M + row, r2)
    tl.store(r_ptr + 2 * M + row, r3)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def poly_norm_forward(x, w, b, eps):
    (M, N), y = x.shape, torch.empty_like(x)
    if w.shape != (3,) or b.numel() != 1 or N > 16384:
        raise ValueError(f"three weights, not {tuple(w.shape)}, and rows of at most 16384, not {N}")
    r = torch.empty((3, M), device=x.device, dtype=torch.float32)
    poly_norm_kernel[(M,)](x, w, b, y, r, M, N, eps, **tile_of(N))
    return y, r


@autodiff(inputs_require_grad=(0, 1, 2))
def poly_norm(x, w, b, eps=1e-6):
    """x: (M, N); w: (3), b: a scalar, both float32."""
    return poly_norm_forward(x.contiguous(), w.contiguous(), b, eps)[0]


def reference(x, w, b, eps=1e-6):
    powers = [x, x * x, x * x * x]
    normed = [u * torch.rsqrt(u.pow(2).mean(1, keepdim=True) + eps) for u in powers]
    return w[0] * normed[0] + w[1] * normed[1] + w[2] * normed[2] + b


SWEEP = [{"M": 8192, "N": 5632}, {"M": 4099, "N": 3000}]
SWEEP_CPU = [{"M": 28, "N": 45}, {"M": 140, "N": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w = torch.tensor([0.5, 0.3, 0.2], device=device)
    return x, w, torch.full((), 0.1, device=device)


# ---- backward ----

MAX_GROUPS = 256  # about two programs a multiprocessor


@triton.jit
def poly_norm_backward_kernel(x_ptr, w_ptr, r_ptr, dy_ptr, dx_ptr, parts_ptr, M, N, G, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w1, w2, w3 = tl.load(w_ptr), tl.load(w_ptr + 1), tl.load(w_ptr + 2)
    dw1, dw2, dw3, db = 0.0, 0.0, 0.0, 0.0
    for row in range(pid, M, G):
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        x2 = x * x
        x3 = x2 * x
        r1, r2, r3 = tl.load(r_ptr + row), tl.load(r_ptr + M + row), tl.load(r_ptr + 2 * M + row)
        s1, s2, s3 = tl.sum(dy * x, axis=0) * r1, tl.sum(dy * x2, axis=0) * r2, tl.sum(dy * x3, axis=0) * r3
        du1 = w1 * r1 * (dy - r1 * x * (s1 / N))
        du2 = w2 * r2 * (dy - r2 * x2 * (s2 / N))
        du3 = w3 * r3 * (dy - r3 * x3 * (s3 / N))
        dx = du1 + 2 * x * du2 + 3 * x2 * du3
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw1 += s1
        dw2 += s2
        dw3 += s3
        db += tl.sum(dy, axis=0)
    tl.store(parts_ptr + pid, dw1)
    tl.store(parts_ptr + G + pid, dw2)
    tl.store(parts_ptr + 2 * G + pid, dw3)
    tl.store(parts_ptr + 3 * G + pid, db)


@triton.jit
def sum_parts_kernel(parts_ptr, dw_ptr, db_ptr, G, BLOCK: tl.constexpr):
    """Program q adds the parts of weight q, the fourth those of b."""
    q, i = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.sum(tl.load(parts_ptr + q * G + i, mask=i < G, other=0.0), axis=0)
    tl.store(dw_ptr + q, total, mask=q < 3)
    tl.store(db_ptr, total, mask=q == 3)


class PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w = x.contiguous(), w.contiguous()
        y, r = poly_norm_forward(x, w, b, eps)
        ctx.save_for_backward(x, w, b, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, b, r = ctx.saved_tensors
        (M, N), needs = x.shape, ctx.needs_input_grad
        G = min(M, MAX_GROUPS)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
        parts = torch.empty((4, G), device=x.device, dtype=torch.float32)
        poly_norm_backward_kernel[(G,)](x, w, r, dy.contiguous(), dx, parts, M, N, G, **tile_of(N))
        if needs[1] or needs[2]:
            sum_parts_kernel[(4,)](parts, dw, db, G, BLOCK=MAX_GROUPS)
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


def poly_norm_autograd(x, w, b, eps=1e-6):
    return PolyNorm.apply(x, w, b, eps)
