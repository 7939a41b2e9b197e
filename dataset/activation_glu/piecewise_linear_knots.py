"""A piecewise linear activation with learned values at its knots, a table for each channel.

Forward    u = min(max(x, 0), K - 1),  y = sum_k v_ck hat(u - k),  hat(w) = max(0, 1 - |w|): knots at 0..K-1,
           values v, straight between, constant outside.  With f = floor(u), at most K - 2, and w = u - f this
           is y = v_cf + w (v_{c,f+1} - v_cf)
Backward   dx = dy (v_{c,f+1} - v_cf) inside, 0 outside;  dv_ck = sum over rows of dy hat(u - k)

Forward schedule: tiles of rows by channels; two numbers of a channel's table are gathered for each element.
Backward schedule: dx gathers the same two numbers. A knot gets from every row whose x falls beside it, so the
transpose of the gather would be an atomic scatter to K addresses a channel. Instead rows are split in blocks,
and the owner of (block, channel, all of its knots) evaluates hat for every pair of row and knot: K is small,
a maximum and a product are cheaper than one atomic, and K sums stay in registers. Blocks leave partials,
which a second kernel adds.

op: piecewise_linear
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_C": 64}


@triton.jit
def place_of(x, K):
    """u, and the knot f below it."""
    u = tl.where(x > 0, tl.where(x < K - 1, x, K - 1), 0.0)
    f = tl.floor(u)
    return u, tl.where(f < K - 2, f, K - 2)


@triton.jit
def load_piece(v_ptr, c, f, mask, K):
    """The values at both ends of each element's piece."""
    left = v_ptr + c[None, :] * K + f.to(tl.int32)
    v_left = tl.load(left, mask=mask, other=0.0).to(tl.float32)
    return v_left, tl.load(left + 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def piecewise_kernel(x_ptr, v_ptr, y_ptr, M, C, K, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows[:, None] < M) & (c[None, :] < C)
    offs = rows[:, None] * C + c[None, :]
    u, f = place_of(tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32), K)
    v_left, v_right = load_piece(v_ptr, c, f, mask, K)
    tl.store(y_ptr + offs, (v_left + (u - f) * (v_right - v_left)).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def piecewise_linear(x, v):
    """x: (M, C); v: (C, K), the values at 0..K-1."""
    (M, C), K = x.shape, v.shape[1]
    if v.shape[0] != C or not 2 <= K <= 64:
        raise ValueError("v has a table of 2 to 64 knots for each channel of x")
    y = torch.empty((M, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(C, TILE["BLOCK_C"]))
    piecewise_kernel[grid](x.contiguous(), v.contiguous(), y, M, C, K, **TILE)
    return y


def reference(x, v):
    C, K = v.shape
    u = torch.where(x > 0, torch.where(x < K - 1, x, K - 1.0), 0.0)
    f = u.detach().floor().clamp(max=K - 2)
    place = torch.arange(C, device=x.device) * K + f.long()
    v_left, v_right = v.flatten()[place], v.flatten()[place + 1]
    return v_left + (u - f) * (v_right - v_left)


SWEEP = [{"M": 65536, "C": 512, "K": 9}, {"M": 30011, "C": 130, "K": 17}]
SWEEP_CPU = [{"M": 40, "C": 8, "K": 9}, {"M": 150, "C": 5, "K": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, C, K = dims["M"], dims["C"], dims["K"]
    x = (K + 1) * torch.rand(M, C, device=device, dtype=dtype) - 1
    return x, torch.randn(C, K, device=device, dtype=dtype)


# ---- backward ----

ROWS = 2048  # of a block


@triton.jit
def dx_kernel(x_ptr, v_ptr, dy_ptr, dx_ptr, M, C, K, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows[:, None] < M) & (c[None, :] < C)
    offs = rows[:, None] * C + c[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    _, f = place_of(x, K)
    v_left, v_right = load_piece(v_ptr, c, f, mask, K)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = tl.where((x > 0) & (x < K - 1), dy * (v_right - v_left), 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def knot_parts_kernel(
    x_ptr, dy_ptr, part_ptr, M, C, K, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    dv = tl.zeros([BLOCK_C, BLOCK_K], dtype=tl.float32)
    first = tl.program_id(0) * ROWS
    for start in range(first, tl.minimum(first + ROWS, M), BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows[:, None] < M) & (c[None, :] < C)
        offs = rows[:, None] * C + c[None, :]
        u, _ = place_of(tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32), K)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        near = 1 - tl.abs(u[:, :, None] - k[None, None, :])
        dv += tl.sum(dy[:, :, None] * tl.where(near > 0, near, 0.0), axis=0)
    slot = part_ptr + tl.program_id(0).to(tl.int64) * C * K + c[:, None] * K + k[None, :]
    tl.store(slot, dv, mask=(c[:, None] < C) & (k[None, :] < K))


@triton.jit
def knot_sum_kernel(part_ptr, dv_ptr, blocks, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(blocks):
        dv += tl.load(part_ptr + block * n + i, mask=i < n, other=0.0)
    tl.store(dv_ptr + i, dv.to(dv_ptr.dtype.element_ty), mask=i < n)


class PiecewiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v):
        x, v = x.contiguous(), v.contiguous()
        ctx.save_for_backward(x, v)
        return piecewise_linear(x, v)

    @staticmethod
    def backward(ctx, dy):
        x, v = ctx.saved_tensors
        (M, C), K, dy = x.shape, v.shape[1], dy.contiguous()
        dx = dv = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(C, TILE["BLOCK_C"]))
            dx_kernel[grid](x, v, dy, dx, M, C, K, **TILE)
        if ctx.needs_input_grad[1]:
            dv, blocks = torch.empty_like(v), triton.cdiv(M, ROWS)
            part = torch.empty((blocks, C, K), device=x.device, dtype=torch.float32)
            knot_parts_kernel[(blocks, triton.cdiv(C, 32))](
                x, dy, part, M, C, K, ROWS=ROWS, BLOCK_M=4, BLOCK_C=32, BLOCK_K=triton.next_power_of_2(K)
            )
            knot_sum_kernel[(triton.cdiv(C * K, 128),)](part, dv, blocks, C * K, BLOCK=128)
        return dx, dv


def piecewise_linear_autograd(x, v):
    return PiecewiseLinear.apply(x, v)
