"""Winograd's 3 x 3 convolution, channels last: 16 products for 2 x 2 outputs, where the plain sum has 36.

Forward    tile (i, j) of outputs 2i, 2i + 1 by 2j, 2j + 1 reads the 4 x 4 inputs d from (2i - 1, 2j - 1) on;
           v = B^T d B,  u = G w G^T,  m_ab = sum_c v_ab,c u_ab,c  for a, b < 4,  y = A^T m A:
           B^T = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1],  G = [1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1],
           A^T = [1 1 1 0; 0 1 -1 -1]
Backward   every step is linear in what it transforms, so each is undone by its transpose:
           dm = A dy A^T,  dv_ab = dm_ab u_ab^T,  du_ab = v_ab^T dm_ab,  dw = G^T du G,
           dx = sum over the tiles that hold the pixel of (B dv B^T) at its place in the tile

Forward schedule: v and u are made by kernels that own one of 16 planes each, M is 16 products of (tiles, C)
with (C, K), batched in one launch, and the owner of an output pixel adds its nine of 16 products.
Backward schedule: the same shape in reverse. dM is owned plane by plane, four loads of dy for each number; dv
and du are 16 products again, by the forward's kernel told other strides. In dU the sum over all tiles is long
and its output small, but there are 16 of them: these are programs enough without splitting the sum. Tiles of
the input overlap by two, so a pixel is in up to four: its owner gathers from them and stores once, where tile
owners would add by atomics. v is saved by the forward, u is made again: it is small.

op: winograd_conv2d
schedule: gather_transpose, swap_owner
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def b_row(a):
    """Row a of B^T has a 1 at `first` and `sign` at `second`."""
    first = tl.where(a == 0, 0, tl.where(a == 2, 2, 1))
    second = tl.where(a == 2, 1, tl.where(a == 3, 3, 2))
    return first, second, tl.where(a == 1, 1.0, -1.0)


@triton.jit
def g_entry(a, r):
    """G[a, r]"""
    inner = tl.where((a == 2) & (r == 1), -0.5, 0.5)
    outer = tl.where((a == 0) & (r == 0), 1.0, tl.where((a == 3) & (r == 2), 1.0, 0.0))
    return tl.where((a == 1) | (a == 2), inner, outer)


@triton.jit
def a_entry(a, s):
    """A[a, s]"""
    upper = tl.where(a == 3, 0.0, 1.0)
    lower = tl.where(a == 0, 0.0, tl.where(a == 1, 1.0, -1.0))
    return tl.where(s == 0, upper, lower)


@triton.jit
def load_pixel(x_ptr, n, i, j, c, mask, H, W, C):
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    return tl.load(x_ptr + ((n * H + i) * W + j) * C + c, mask=inside, other=0.0)


@triton.jit
def input_kernel(x_ptr, v_ptr, total, H, W, C, TY, TX, BLOCK: tl.constexpr):
    """One plane of v; total: tiles times C."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.program_id(1) // 4, tl.program_id(1) % 4
    c, tile = at % C, at // C
    n, i, j = tile // (TY * TX), tile // TX % TY * 2 - 1, tile % TX * 2 - 1
    i0, i1, down = b_row(a)
    j0, j1, across = b_row(b)
    top = load_pixel(x_ptr, n, i + i0, j + j0, c, at < total, H, W, C)
    top += across * load_pixel(x_ptr, n, i + i0, j + j1, c, at < total, H, W, C)
    low = load_pixel(x_ptr, n, i + i1, j + j0, c, at < total, H, W, C)
    low += across * load_pixel(x_ptr, n, i + i1, j + j1, c, at < total, H, W, C)
    tl.store(v_ptr + tl.program_id(1) * total + at, top + down * low, mask=at < total)


@triton.jit
def weight_kernel(w_ptr, u_ptr, total, BLOCK: tl.constexpr):
    """One plane of u; total: C times K."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.program_id(1) // 4, tl.program_id(1) % 4
    u = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(9):
        w = tl.load(w_ptr + tap * total + at, mask=at < total, other=0.0)
        u += g_entry(a, tap // 3) * g_entry(b, tap % 3) * w
    tl.store(u_ptr + tl.program_id(1) * total + at, u, mask=at < total)


@triton.jit
def load_tile(ptr, rows, cols, R, C, step_r, step_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * step_r + cols[None, :] * step_c, mask=mask, other=0.0)


@triton.jit
def product_kernel(
    l_ptr, r_ptr, o_ptr, M, I, N, l_m, l_i, r_i, r_n, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    """O = L R on each of 16 planes; L: (M, I) with strides l_m and l_i, R: (I, N), O: (M, N) dense."""
    plane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, I, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        left = load_tile(l_ptr + plane * M * I, m, i, M, I, l_m, l_i)
        o = tl.dot(left, load_tile(r_ptr + plane * I * N, i, n, I, N, r_i, r_n), o, input_precision=PRECISION)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(o_ptr + plane * M * N + m[:, None] * N + n[None, :], o, mask=mask)


def products(left, right, M, I, N, l_m, l_i, r_i, r_n):
    out = torch.empty((16, M, N), device=left.device, dtype=left.dtype)
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), 16)
    product_kernel[grid](left, right, out, M, I, N, l_m, l_i, r_i, r_n, PRECISION=PRECISION, BLOCK=32)
    return out


@triton.jit
def output_kernel(m_ptr, y_ptr, n_out, plane_size, H, W, K, TY, TX, BLOCK: tl.constexpr):
    """y, and what it needs of the 16 planes of m, each of plane_size numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k, j, i, n = at % K, at // K % W, at // (K * W) % H, at // (K * W * H)
    own = m_ptr + ((n * TY + i // 2) * TX + j // 2) * K + k
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for plane in tl.static_range(16):
        share = a_entry(plane // 4, i % 2) * a_entry(plane % 4, j % 2)
        y += share * tl.load(own + plane * plane_size, mask=(at < n_out) & (share != 0), other=0.0)
    tl.store(y_ptr + at, y, mask=at < n_out)


def transform_weights(w):
    u = torch.empty((16, *w.shape[2:]), device=w.device, dtype=w.dtype)
    total = w.shape[2] * w.shape[3]
    weight_kernel[(triton.cdiv(total, 256), 16)](w, u, total, BLOCK=256)
    return u


def winograd_forward(x, w):
    (N, H, W, C), (R, Q, D, K) = x.shape, w.shape
    if (R, Q, D) != (3, 3, C):
        raise ValueError(f"w {tuple(w.shape)} is not 3 x 3 for {C} channels")
    TY, TX = triton.cdiv(H, 2), triton.cdiv(W, 2)
    P = N * TY * TX
    v, y = (torch.empty(s, device=x.device, dtype=x.dtype) for s in ((16, P, C), (N, H, W, K)))
    input_kernel[(triton.cdiv(P * C, 256), 16)](x, v, P * C, H, W, C, TY, TX, BLOCK=256)
    m = products(v, transform_weights(w), P, C, K, C, 1, K, 1)
    output_kernel[(triton.cdiv(y.numel(), 256),)](m, y, y.numel(), P * K, H, W, K, TY, TX, BLOCK=256)
    return y, v


@autodiff(inputs_require_grad=(0, 1))
def winograd_conv2d(x, w):
    """x: (N, H, W, C) float32; w: (3, 3, C, K), padded by 1 on every side; gives (N, H, W, K)."""
    return winograd_forward(x.contiguous(), w.contiguous())[0]


def reference(x, w):
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(3, 2, 0, 1).contiguous()
    return torch.nn.functional.conv2d(x, w, padding=1).permute(0, 2, 3, 1)


SWEEP = [
    {"N": 8, "H": 56, "W": 56, "C": 128, "K": 128},
    {"N": 5, "H": 31, "W": 45, "C": 70, "K": 50},
]
SWEEP_CPU = [{"N": 1, "H": 5, "W": 6, "C": 16, "K": 9}, {"N": 2, "H": 4, "W": 3, "C": 5, "K": 35}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = torch.randn(dims["N"], dims["H"], dims["W"], C, device=device, dtype=dtype)
    return x, torch.randn(3, 3, C, dims["K"], device=device, dtype=dtype) / (3 * max(1, C) ** 0.5)


# ---- backward ----


@triton.jit
def dm_kernel(dy_ptr, dm_ptr, total, H, W, K, TY, TX, BLOCK: tl.constexpr):
    """One plane of dm; total: tiles times K."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.program_id(1) // 4, tl.program_id(1) % 4
    k, tile = at % K, at // K
    n, i, j = tile // (TY * TX), tile // TX % TY * 2, tile % TX * 2
    dm = tl.zeros([BLOCK], dtype=tl.float32)
    for corner in tl.static_range(4):
        dy = load_pixel(dy_ptr, n, i + corner // 2, j + corner % 2, k, at < total, H, W, K)
        dm += a_entry(a, corner // 2) * a_entry(b, corner % 2) * dy
    tl.store(dm_ptr + tl.program_id(1) * total + at, dm, mask=at < total)


@triton.jit
def b_entry(a, r):
    """B^T[a, r]"""
    first, second, sign = b_row(a)
    return tl.where(r == first, 1.0, tl.where(r == second, sign, 0.0))


@triton.jit
def dx_kernel(dv_ptr, dx_ptr, n_in, plane_size, H, W, C, TY, TX, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, j, i, n = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for which in tl.static_range(4):  # the tile that begins just above and left, and those before it
        ty, tx = (i + 1) // 2 - which // 2, (j + 1) // 2 - which % 2
        r, q = i + 1 - 2 * ty, j + 1 - 2 * tx
        exists = (at < n_in) & (ty >= 0) & (ty < TY) & (tx >= 0) & (tx < TX)
        own = dv_ptr + ((n * TY + ty) * TX + tx) * C + c
        for plane in tl.static_range(16):
            share = b_entry(plane // 4, r) * b_entry(plane % 4, q)
            dx += share * tl.load(own + plane * plane_size, mask=exists & (share != 0), other=0.0)
    tl.store(dx_ptr + at, dx, mask=at < n_in)


@triton.jit
def dw_kernel(du_ptr, dw_ptr, total, BLOCK: tl.constexpr):
    """One tap of dw."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, q = tl.program_id(1) // 3, tl.program_id(1) % 3
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for plane in tl.static_range(16):
        du = tl.load(du_ptr + plane * total + at, mask=at < total, other=0.0)
        dw += g_entry(plane // 4, r) * g_entry(plane % 4, q) * du
    tl.store(dw_ptr + tl.program_id(1) * total + at, dw, mask=at < total)


class WinogradConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        y, v = winograd_forward(x, w)
        ctx.save_for_backward(w, v)
        ctx.x_shape = x.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        w, v = ctx.saved_tensors
        (N, H, W, C), K, dy = ctx.x_shape, w.shape[3], dy.contiguous()
        TY, TX = triton.cdiv(H, 2), triton.cdiv(W, 2)
        P = N * TY * TX
        dm = torch.empty((16, P, K), device=dy.device, dtype=dy.dtype)
        dm_kernel[(triton.cdiv(P * K, 256), 16)](dy, dm, P * K, H, W, K, TY, TX, BLOCK=256)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dv = products(dm, transform_weights(w), P, K, C, K, 1, 1, K)
            dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
            n = dx.numel()
            dx_kernel[(triton.cdiv(n, 256),)](dv, dx, n, P * C, H, W, C, TY, TX, BLOCK=256)
        if ctx.needs_input_grad[1]:
            du, dw = products(v, dm, C, P, K, 1, C, K, 1), torch.empty_like(w)
            dw_kernel[(triton.cdiv(C * K, 256), 9)](du, dw, C * K, BLOCK=256)
        return dx, dw


def winograd_conv2d_autograd(x, w):
    return WinogradConv2d.apply(x, w)
