"""Linear layer whose weights are 4-bit places in a table of 16 values for each output.

Forward    W_nk = C_n,q_nk,   Y = X W^T
Backward   dX = dY W;   q is fixed, so a value of the table collects the gradient of all weights that it
           stands for:  dW = dY^T X,   dC_nc = sum_{k: q_nk = c} dW_nk

Forward schedule: a program owns a tile of Y; a tile of W is looked up on load, from half a byte a weight and
a row of the table, which stays in the first-level cache.
Backward schedule: dX is a product with the same look-up, W is never stored. Neither is dW: its tile is made
in registers by the owner of (outputs, a chunk of inputs), and pressed into 16 numbers a row by comparing the
codes with each place of the table: sums over masks where a scatter would need atomics. An output's table
belongs to all chunks of inputs; each leaves one slot of (outputs, 16), and a second kernel adds the slots.

op: lut_linear
schedule: index_or_seed_replay, recompute_from_stats, partials_then_reduce
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
    sizes = {"BLOCK": 32} if x.dtype == torch.float32 else {"BLOCK": 64, "num_warps": 8}
    return {"PRECISION": PRECISION, **sizes}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_codes(packed_ptr, n, k, N, K):
    """n, k: places that broadcast to a tile, such as (n, 1) and (1, k)."""
    mask = (n < N) & (k < K)
    pair = tl.load(packed_ptr + n.to(tl.int64) * (K // 2) + k // 2, mask=mask, other=0).to(tl.int32)
    return (pair >> (k % 2 * 4)) & 15, mask


@triton.jit
def load_weights(packed_ptr, c_ptr, n, k, N, K):
    code, mask = load_codes(packed_ptr, n, k, N, K)
    return tl.load(c_ptr + n * 16 + code, mask=mask, other=0.0)


@triton.jit
def lut_linear_kernel(x_ptr, packed_ptr, c_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w_t = load_weights(packed_ptr, c_ptr, n[None, :], k[:, None], N, K)
        y = tl.dot(load_tile(x_ptr, m, k, M, K), w_t, y, input_precision=PRECISION)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def check_layer(x, packed, c):
    N = c.shape[0]
    if packed.dtype != torch.uint8 or packed.shape != (N, x.shape[1] // 2) or x.shape[1] % 2:
        raise ValueError("need x (M, K), packed uint8 (N, K / 2), K even")
    if c.shape != (N, 16) or c.dtype != x.dtype:
        raise ValueError("need a table (N, 16) of x's dtype")


@autodiff(inputs_require_grad=(0, 2))
def lut_linear(x, packed, c):
    """x: (M, K); packed: uint8 (N, K / 2), the even input in the low half; c: (N, 16), the tables."""
    check_layer(x, packed, c)
    x, packed, c, tiles = x.contiguous(), packed.contiguous(), c.contiguous(), tiling(x)
    (M, K), N = x.shape, c.shape[0]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    lut_linear_kernel[grid](x, packed, c, y, M, N, K, **tiles)
    return y


def reference(x, packed, c):
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).long()
    return x @ c.gather(1, codes).t()


SWEEP = [{"M": 4096, "half": 2048, "N": 4096}, {"M": 1021, "half": 1000, "N": 3001}]
SWEEP_CPU = [{"M": 17, "half": 24, "N": 35}, {"M": 70, "half": 9, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, half, N = dims["M"], dims["half"], dims["N"]
    x = torch.randn(M, 2 * half, device=device, dtype=dtype)
    packed = torch.randint(0, 256, (N, half), device=device, dtype=torch.uint8)
    return x, packed, torch.randn(N, 16, device=device, dtype=dtype) / max(1, half) ** 0.5


# ---- backward ----


@triton.jit
def input_kernel(dy_ptr, packed_ptr, c_ptr, dx_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        w = load_weights(packed_ptr, c_ptr, n[:, None], k[None, :], N, K)
        dx = tl.dot(load_tile(dy_ptr, m, n, M, N), w, dx, input_precision=PRECISION)
    mask = (m[:, None] < M) & (k[None, :] < K)
    tl.store(dx_ptr + m[:, None].to(tl.int64) * K + k[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def table_kernel(x_ptr, dy_ptr, packed_ptr, part_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy_t = tl.trans(load_tile(dy_ptr, m, n, M, N))
        dw = tl.dot(dy_t, load_tile(x_ptr, m, k, M, K), dw, input_precision=PRECISION)
    code, _ = load_codes(packed_ptr, n[:, None], k[None, :], N, K)  # inputs past K have dW = 0
    places = tl.arange(0, 16)
    dc = tl.zeros([BLOCK, 16], dtype=tl.float32)
    for c in tl.static_range(16):
        total = tl.sum(tl.where(code == c, dw, 0.0), axis=1)
        dc = tl.where(places[None, :] == c, total[:, None], dc)
    slot = tl.program_id(1).to(tl.int64) * N + n
    tl.store(part_ptr + slot[:, None] * 16 + places[None, :], dc, mask=n[:, None] < N)


@triton.jit
def sum_slots_kernel(part_ptr, dc_ptr, slots, count, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        total += tl.load(part_ptr + slot * count + e.to(tl.int64), mask=e < count, other=0.0)
    tl.store(dc_ptr + e, total.to(dc_ptr.dtype.element_ty), mask=e < count)


class LUTLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, c):
        x, packed, c = x.contiguous(), packed.contiguous(), c.contiguous()
        ctx.save_for_backward(x, packed, c)
        return lut_linear(x, packed, c)

    @staticmethod
    def backward(ctx, dy):
        x, packed, c = ctx.saved_tensors
        dy, tiles = dy.contiguous(), tiling(x)
        (M, K), N, BLOCK = x.shape, c.shape[0], tiles["BLOCK"]
        dx = dc = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            input_kernel[(triton.cdiv(M, BLOCK), triton.cdiv(K, BLOCK))](dy, packed, c, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[2]:
            dc, slots = torch.empty_like(c), triton.cdiv(K, BLOCK)
            part = torch.empty((slots, N, 16), device=x.device, dtype=torch.float32)
            table_kernel[(triton.cdiv(N, BLOCK), slots)](x, dy, packed, part, M, N, K, **tiles)
            sum_slots_kernel[(triton.cdiv(N * 16, 256),)](part, dc, slots, N * 16, BLOCK=256)
        return dx, None, dc


def lut_linear_autograd(x, packed, c):
    return LUTLinear.apply(x, packed, c)
