"""Global response norm, channels last: each channel is scaled by its share of the response over the image.

Forward    G_c = |x_c| over the P pixels of a sample,  m = mean_c G_c + e,  n_c = G_c / m,
           y = x + w_c n_c x + b_c
Backward   with h_c = sum_p dy x and q_c = w_c h_c, the gradient of n_c:
           dG_c = (q_c - (1 / C) sum_k q_k n_k) / m,  dx = (1 + w_c n_c) dy + (dG_c / G_c) x;
           dw_c = sum over samples of n_c h_c,  db_c = sum over samples and pixels of dy

Forward schedule: a sample has few channels' norms and many pixels: programs own (sample, split of the pixels,
channel tile) and store sums of squares; one program a sample adds the splits, and has all of G for the mean;
a pointwise launch writes y.
Backward schedule: the same three. The splits store their parts of h and of the sum of dy. One program a
sample adds them: it couples the channels in one sum, <q, n>, and leaves dG / G, the one factor that dx
wants, with the sample's parts of dw and db, which the same h and n give. Then dx is pointwise: two numbers a
channel, one read of x and dy. The parts of dw and db are added over samples at the end. x is read twice and
nothing as large as x is stored but dx.

op: global_response_norm
schedule: partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


ROWS = 128  # pixels of a split
TILE = {"BLOCK_P": 16, "BLOCK_C": 128}


@triton.jit
def load_tile(ptr, n, p, c, end, P, C):
    mask = (p[:, None] < end) & (c[None, :] < C)
    return tl.load(ptr + (n * P + p[:, None]) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def square_sum_kernel(
    x_ptr, part_ptr, P, C, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    end = tl.minimum(split * ROWS + ROWS, P)
    squares = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(split * ROWS, end, BLOCK_P):
        x = load_tile(x_ptr, n, start + tl.arange(0, BLOCK_P), c, end, P, C)
        squares += x * x
    own = (n * tl.num_programs(1) + split) * C
    tl.store(part_ptr + own + c, tl.sum(squares, axis=0), mask=c < C)


@triton.jit
def response_kernel(part_ptr, g_ptr, m_ptr, S, C, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(S):
        squares += tl.load(part_ptr + (n * S + split) * C + c, mask=c < C, other=0.0)
    g = tl.sqrt(squares)
    tl.store(g_ptr + n * C + c, g, mask=c < C)
    tl.store(m_ptr + n, tl.sum(g, axis=0) / C + eps)


@triton.jit
def scale_kernel(
    x_ptr, w_ptr, b_ptr, g_ptr, m_ptr, y_ptr, P, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    n = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    scale = 1 + w * tl.load(g_ptr + n * C + c, mask=c < C, other=0.0) / tl.load(m_ptr + n)
    y = load_tile(x_ptr, n, p, c, P, P, C) * scale[None, :] + b[None, :]
    mask = (p[:, None] < P) & (c[None, :] < C)
    tl.store(y_ptr + (n * P + p[:, None]) * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def response_norm_forward(x, w, b, eps):
    N, P, C = x.shape
    if C > 16384:
        raise ValueError(f"{C} channels do not fit one tile")
    S, columns = triton.cdiv(P, ROWS), triton.cdiv(C, TILE["BLOCK_C"])
    y = torch.empty_like(x)
    part = torch.empty((N, S, C), device=x.device, dtype=torch.float32)
    g = torch.empty((N, C), device=x.device, dtype=torch.float32)
    m = torch.empty(N, device=x.device, dtype=torch.float32)
    square_sum_kernel[(N, S, columns)](x, part, P, C, ROWS=ROWS, **TILE)
    response_kernel[(N,)](part, g, m, S, C, eps, BLOCK=triton.next_power_of_2(C))
    scale_kernel[(triton.cdiv(P, TILE["BLOCK_P"]), N, columns)](x, w, b, g, m, y, P, C, **TILE)
    return y, g, m


@autodiff(inputs_require_grad=(0, 1, 2))
def global_response_norm(x, w, b, eps=1e-6):
    """x: (N, pixels, C); w, b: (C)."""
    return response_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-6):
    G = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x + w * x * G / (G.mean(-1, keepdim=True) + eps) + b


SWEEP = [{"N": 32, "P": 784, "C": 1536}, {"N": 5, "P": 3137, "C": 650}]
SWEEP_CPU = [{"N": 2, "P": 35, "C": 12}, {"N": 3, "P": 140, "C": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = torch.randn(dims["N"], dims["P"], C, device=device, dtype=dtype)
    w, b = (torch.randn(C, device=device, dtype=dtype) for _ in range(2))
    return x, w, b


# ---- backward ----


@triton.jit
def split_sums_kernel(
    x_ptr, dy_ptr, h_part, e_part, P, C,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    end = tl.minimum(split * ROWS + ROWS, P)
    h = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    e = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(split * ROWS, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        dy = load_tile(dy_ptr, n, p, c, end, P, C)
        h += dy * load_tile(x_ptr, n, p, c, end, P, C)
        e += dy
    own = (n * tl.num_programs(1) + split) * C
    tl.store(h_part + own + c, tl.sum(h, axis=0), mask=c < C)
    tl.store(e_part + own + c, tl.sum(e, axis=0), mask=c < C)


@triton.jit
def couple_kernel(
    h_part, e_part, w_ptr, g_ptr, m_ptr, slope_ptr, dw_part, db_part, S, C, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    h = tl.zeros([BLOCK], dtype=tl.float32)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(S):
        h += tl.load(h_part + (n * S + split) * C + c, mask=mask, other=0.0)
        e += tl.load(e_part + (n * S + split) * C + c, mask=mask, other=0.0)
    w = tl.load(w_ptr + c, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + n * C + c, mask=mask, other=0.0)
    m = tl.load(m_ptr + n)
    q = w * h
    share = g / m
    dg = (q - tl.sum(q * share, axis=0) / C) / m
    slope = tl.where(g > 0, dg / tl.where(g > 0, g, 1.0), 0.0)  # a channel of zeros has no direction
    tl.store(slope_ptr + n * C + c, slope, mask=mask)
    tl.store(dw_part + n * C + c, share * h, mask=mask)
    tl.store(db_part + n * C + c, e, mask=mask)


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, g_ptr, m_ptr, slope_ptr, dy_ptr, dx_ptr, P, C,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    scale = 1 + w * tl.load(g_ptr + n * C + c, mask=c < C, other=0.0) / tl.load(m_ptr + n)
    slope = tl.load(slope_ptr + n * C + c, mask=c < C, other=0.0)
    dx = load_tile(dy_ptr, n, p, c, P, P, C) * scale[None, :]
    dx += load_tile(x_ptr, n, p, c, P, P, C) * slope[None, :]
    mask = (p[:, None] < P) & (c[None, :] < C)
    tl.store(dx_ptr + (n * P + p[:, None]) * C + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sample_sum_kernel(dw_part, db_part, dw_ptr, db_ptr, N, C, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for n in range(N):
        dw += tl.load(dw_part + n * C + c, mask=c < C, other=0.0)
        db += tl.load(db_part + n * C + c, mask=c < C, other=0.0)
    tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty), mask=c < C)
    tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty), mask=c < C)


class GlobalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, g, m = response_norm_forward(x, w, b, eps)
        ctx.save_for_backward(x, w, g, m)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, g, m = ctx.saved_tensors
        dy = dy.contiguous()
        N, P, C = x.shape
        S, columns = triton.cdiv(P, ROWS), triton.cdiv(C, TILE["BLOCK_C"])
        parts = torch.empty((2, N, S, C), device=x.device, dtype=torch.float32)
        slope, dw_part, db_part = torch.empty((3, N, C), device=x.device, dtype=torch.float32)
        split_sums_kernel[(N, S, columns)](x, dy, *parts, P, C, ROWS=ROWS, **TILE)
        BLOCK = triton.next_power_of_2(C)
        couple_kernel[(N,)](*parts, w, g, m, slope, dw_part, db_part, S, C, BLOCK=BLOCK)
        needs = ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(P, TILE["BLOCK_P"]), N, columns)
            dx_kernel[grid](x, w, g, m, slope, dy, dx, P, C, **TILE)
        if needs[1] or needs[2]:
            dw, db = torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
            sample_sum_kernel[(triton.cdiv(C, 64),)](dw_part, db_part, dw, db, N, C, BLOCK=64)
        return dx, dw if needs[1] else None, db if needs[2] else None, None


def global_response_norm_autograd(x, w, b, eps=1e-6):
    return GlobalResponseNorm.apply(x, w, b, eps)
