"""Classifier by cosine: rows of x and rows of w at unit length, times a learned scale.

Forward    a_i = (|x_i|^2 + eps)^(-1/2),  u_i = a_i x_i;   b_j = (|w_j|^2 + eps)^(-1/2),  v_j = b_j w_j;
           y_ij = s <u_i, v_j>
Backward   du_i = s sum_j dy_ij v_j, and a unit row has dx_i = a_i (du_i - u_i <du_i, u_i>). The product in it
           is <du_i, u_i> = sum_j dy_ij s <v_j, u_i> = sum_j dy_ij y_ij =: c_i, known before du is. So
           dx_i = a_i (s sum_j dy_ij v_j - c_i u_i),   dw_j = b_j (s sum_i dy_ij u_i - c'_j v_j) with
           c'_j = sum_i dy_ij y_ij,   ds = sum_ij dy_ij <u_i, v_j>

Forward schedule: a and b by owners of rows; then a plain product of x and w with the scales in its epilogue.
The unit rows are never stored.
Backward schedule: the projection of a row seems to need its whole du, so a product, a store, a row sum and a
second pass. With c from y and dy it needs none: tiles of dx are finished in the epilogue of their product, by
owners who know nothing of the row's other tiles. c and c' are two sums of dy y, by one kernel that takes
strides, and one more kernel is dx and dw in turn. ds is not c's sum over s, which would be 0 / 0 for s = 0:
dx's owners have sum_j dy_ij v_j and u at hand, store their tile's share, and one program adds those.

op: cosine_linear
schedule: row_reduce_correct, swap_owner, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_scale_kernel(x_ptr, a_ptr, R, K, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        x = load_tile(x_ptr, i, start + tl.arange(0, BLOCK), R, K, K, 1).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    tl.store(a_ptr + i, tl.rsqrt(squares + eps), mask=i < R)


@triton.jit
def cosine_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, s_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, k, j, K, N, 1, K)
        y = tl.dot(load_tile(x_ptr, i, k, M, K, K, 1), w, y, input_precision=PRECISION)
    a = tl.load(a_ptr + i, mask=i < M, other=0.0)
    b = tl.load(b_ptr + j, mask=j < N, other=0.0)
    s = tl.load(s_ptr).to(tl.float32)
    store_tile(y_ptr, y * a[:, None] * b[None, :] * s, i, j, M, N)


def row_scales(x, eps):
    a = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    row_scale_kernel[(triton.cdiv(x.shape[0], 32),)](x, a, *x.shape, eps, BLOCK=32)
    return a


def cosine_linear_forward(x, w, s, eps):
    if x.shape[1] != w.shape[1] or s.numel() != 1:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and s {tuple(s.shape)} do not fit")
    (M, K), N, tiles = x.shape, w.shape[0], tiling(x)
    a, b = row_scales(x, eps), row_scales(w, eps)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    cosine_kernel[grid](x, w, a, b, s, y, M, N, K, **tiles)
    return y, a, b


@autodiff(inputs_require_grad=(0, 1, 2))
def cosine_linear(x, w, s, eps=1e-6):
    """x: (M, K); w: (N, K); s: a scalar; gives (M, N)."""
    return cosine_linear_forward(x.contiguous(), w.contiguous(), s, eps)[0]


def reference(x, w, s, eps=1e-6):
    u = x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + eps)
    v = w * torch.rsqrt(w.pow(2).sum(1, keepdim=True) + eps)
    return s * u @ v.t()


SWEEP = [{"M": 4096, "K": 512, "N": 16384}, {"M": 2047, "K": 700, "N": 5001}]
SWEEP_CPU = [{"M": 31, "K": 37, "N": 26}, {"M": 40, "K": 9, "N": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype)
    return x, w, torch.full((), 16.0, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def dot_sums_kernel(y_ptr, dy_ptr, c_ptr, R, C, stride_r, stride_c, BLOCK: tl.constexpr):
    """Sums of dy y over the second index."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        y = load_tile(y_ptr, i, j, R, C, stride_r, stride_c).to(tl.float32)
        c += tl.sum(y * load_tile(dy_ptr, i, j, R, C, stride_r, stride_c).to(tl.float32), axis=1)
    tl.store(c_ptr + i, c, mask=i < R)


@triton.jit
def grad_kernel(
    dy_ptr, own_ptr, own_scale_ptr, other_ptr, other_scale_ptr, c_ptr, s_ptr, grad_ptr, ds_slots_ptr,
    R, C, K, stride_r, stride_c, SLOTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, i, j, R, C, stride_r, stride_c)
        scale = tl.load(other_scale_ptr + j, mask=j < C, other=0.0)
        v = load_tile(other_ptr, j, k, C, K, K, 1).to(tl.float32) * scale[:, None]
        total = tl.dot(dy, v.to(dy.dtype), total, input_precision=PRECISION)
    a = tl.load(own_scale_ptr + i, mask=i < R, other=0.0)[:, None]
    c = tl.load(c_ptr + i, mask=i < R, other=0.0)[:, None]
    u = load_tile(own_ptr, i, k, R, K, K, 1).to(tl.float32) * a
    store_tile(grad_ptr, a * (tl.load(s_ptr).to(tl.float32) * total - c * u), i, k, R, K)
    if SLOTS:
        slot = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(ds_slots_ptr + slot, tl.sum(tl.sum(total * u, axis=1), axis=0))


@triton.jit
def scale_sum_kernel(slots_ptr, ds_ptr, slots, BLOCK: tl.constexpr):
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ds += tl.load(slots_ptr + i, mask=i < slots, other=0.0)
    tl.store(ds_ptr, tl.sum(ds, axis=0).to(ds_ptr.dtype.element_ty))


class CosineLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, s, eps):
        x, w = x.contiguous(), w.contiguous()
        y, a, b = cosine_linear_forward(x, w, s, eps)
        ctx.save_for_backward(x, w, s, a, b, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, s, a, b, y = ctx.saved_tensors
        dy, (M, K), N, tiles, needs = dy.contiguous(), x.shape, w.shape[0], tiling(x), ctx.needs_input_grad
        BLOCK = tiles["BLOCK"]
        dx, dw, ds = torch.empty_like(x), torch.empty_like(w), torch.empty_like(s)
        grid = (triton.cdiv(M, BLOCK), triton.cdiv(K, BLOCK))
        slots = torch.empty(grid, device=x.device, dtype=torch.float32)
        if needs[0] or needs[2]:
            c = torch.empty_like(a)
            dot_sums_kernel[(triton.cdiv(M, 32),)](y, dy, c, M, N, N, 1, BLOCK=32)
            grad_kernel[grid](dy, x, a, w, b, c, s, dx, slots, M, N, K, N, 1, SLOTS=True, **tiles)
        if needs[1]:
            c = torch.empty_like(b)
            dot_sums_kernel[(triton.cdiv(N, 32),)](y, dy, c, N, M, 1, N, BLOCK=32)
            grid = (triton.cdiv(N, BLOCK), triton.cdiv(K, BLOCK))
            grad_kernel[grid](dy, w, b, x, a, c, s, dw, slots, N, M, K, 1, N, SLOTS=False, **tiles)
        if needs[2]:
            scale_sum_kernel[(1,)](slots, ds, slots.numel(), BLOCK=1024)
        return dx if needs[0] else None, dw if needs[1] else None, ds if needs[2] else None, None


def cosine_linear_autograd(x, w, s, eps=1e-6):
    return CosineLinear.apply(x, w, s, eps)
