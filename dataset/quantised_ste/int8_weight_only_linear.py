"""Linear layer with int8 weights and a learned scale per output.

Forward    Y = (X Wq^T) * s,  X (M, K), Wq int8 (N, K), s (N)
Backward   dX = (dY * s) Wq;   ds_n = sum_m dY_mn (X Wq^T)_mn

Forward schedule: a program owns a tile of Y, converts int8 tiles to the activations' dtype on load, and
scales in the epilogue.
Backward schedule: dX is a product owned by its tiles, with dY scaled and Wq converted on load, so no
dequantised weight is ever stored. ds changes the ownership: (column tile) walks the rows, rebuilds each
tile of X Wq^T from int8 and sums its product with dY: exact in fp32 and for s = 0, where dividing a saved Y
by s would be neither.

op: int8_linear
schedule: swap_owner, row_reduce_correct
difficulty: 3
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
def product_tile(x_ptr, wq_ptr, m, n, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """The tile (m, n) of X Wq^T."""
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x_mask = (m[:, None] < M) & (k[None, :] < K)
        w_mask = (n[None, :] < N) & (k[:, None] < K)
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * K + k[None, :], mask=x_mask, other=0.0)
        wq_t = tl.load(wq_ptr + n[None, :].to(tl.int64) * K + k[:, None], mask=w_mask, other=0)
        acc = tl.dot(x, wq_t.to(x.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit
def int8_linear_kernel(
    x_ptr, wq_ptr, s_ptr, y_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(s_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    y = product_tile(x_ptr, wq_ptr, m, n, M, N, K, PRECISION, BLOCK) * s[None, :]
    y_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0, 2))
def int8_linear(x, wq, s):
    if wq.dtype != torch.int8 or x.shape[1] != wq.shape[1] or s.shape[0] != wq.shape[0]:
        raise ValueError("need x (M, K), int8 wq (N, K) and s (N)")
    x, wq, s = x.contiguous(), wq.contiguous(), s.contiguous()
    M, K = x.shape
    N = wq.shape[0]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    tiles = tiling(x)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    int8_linear_kernel[grid](x, wq, s, y, M, N, K, **tiles)
    return y


def reference(x, wq, s):
    return x @ wq.to(x.dtype).t() * s


SWEEP = [
    {"M": 4096, "K": 4096, "N": 4096},
    {"M": 2048, "K": 2048, "N": 8192},
    {"M": 4095, "K": 1000, "N": 3001},
]
SWEEP_CPU = [{"M": 33, "K": 48, "N": 40}, {"M": 70, "K": 20, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    wq = torch.randint(-127, 128, (dims["N"], dims["K"]), device=device, dtype=torch.int8)
    return x, wq, (0.5 + torch.rand(dims["N"], device=device, dtype=dtype)) / 127


# ---- backward ----


@triton.jit
def dx_kernel(
    dy_ptr, wq_ptr, s_ptr, dx_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = tl.load(
            dy_ptr + m[:, None].to(tl.int64) * N + n[None, :],
            mask=(m[:, None] < M) & (n[None, :] < N),
            other=0.0,
        )
        wq = tl.load(
            wq_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n[:, None] < N) & (k[None, :] < K),
            other=0,
        )
        s = tl.load(s_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        scaled = (dy.to(tl.float32) * s[None, :]).to(dy.dtype)
        acc = tl.dot(scaled, wq.to(dy.dtype), acc, input_precision=PRECISION)
    dx_mask = (m[:, None] < M) & (k[None, :] < K)
    tl.store(dx_ptr + m[:, None].to(tl.int64) * K + k[None, :], acc.to(dx_ptr.dtype.element_ty), mask=dx_mask)


@triton.jit
def ds_kernel(
    dy_ptr, x_ptr, wq_ptr, ds_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        mask = (m[:, None] < M) & (n[None, :] < N)
        dy = tl.load(dy_ptr + m[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        ds += tl.sum(dy * product_tile(x_ptr, wq_ptr, m, n, M, N, K, PRECISION, BLOCK), axis=0)
    tl.store(ds_ptr + n, ds.to(ds_ptr.dtype.element_ty), mask=n < N)


class Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, s):
        x, wq, s = x.contiguous(), wq.contiguous(), s.contiguous()
        ctx.save_for_backward(x, wq, s)
        return int8_linear(x, wq, s)

    @staticmethod
    def backward(ctx, dy):
        x, wq, s = ctx.saved_tensors
        dy = dy.contiguous()
        M, K = x.shape
        N = wq.shape[0]
        tiles = tiling(x)
        BLOCK = tiles["BLOCK"]
        dx = ds = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, BLOCK), triton.cdiv(K, BLOCK))](dy, wq, s, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[2]:
            ds = torch.empty_like(s)
            ds_kernel[(triton.cdiv(N, BLOCK),)](dy, x, wq, ds, M, N, K, **tiles)
        return dx, None, ds


def int8_linear_autograd(x, wq, s):
    return Int8Linear.apply(x, wq, s)
