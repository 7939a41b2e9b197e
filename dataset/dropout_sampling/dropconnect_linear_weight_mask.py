"""Linear layer with DropConnect: weights are dropped, not activations.

Forward    V = W m / (1 - p),  m_nk = [u_nk >= p], u the Philox stream of a seed;   y = x V^T
Backward   dx = dy V;   dW = (dy^T x) m / (1 - p)

Forward schedule: V is made by a pass over W, then a plain product reads it. Drawing m inside the product
would save that pass, but a tile of W is loaded by every tile of rows: with 8192 rows each number would be
drawn a hundred times, and drawing costs ten rounds of integer products.
Backward schedule: V is not saved. It is made again for dx, a pass over N K numbers beside a product of M N K,
by the same kernel from the same seed. dW needs the mask once for each weight, so there it is drawn in the
product after all: the owner of a tile of dW walks the rows, and in its epilogue draws m for its own tile and
scales. The unmasked dy^T x is never stored.

op: dropconnect_linear
schedule: index_or_seed_replay, swap_owner
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
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def drop(value, offs, p, seed):
    return tl.where(tl.rand(seed, offs) >= p, value / (1 - p), 0.0)


@triton.jit
def drop_kernel(w_ptr, v_ptr, n_elements, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    tl.store(v_ptr + offs, drop(w, offs, p, seed).to(v_ptr.dtype.element_ty), mask=offs < n_elements)


def dropped(w, p, seed):
    v, n = torch.empty_like(w), w.numel()
    drop_kernel[(triton.cdiv(n, 512),)](w, v, n, p, seed, BLOCK=512)
    return v


@triton.jit
def product_kernel(
    x_ptr, v_ptr, y_ptr, M, N, K, TURN: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    """y (M, N) = x (M, K) v, v (K, N), or (N, K) to be turned."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        if TURN:
            v = tl.trans(load_tile(v_ptr, n, k, N, K))
        else:
            v = load_tile(v_ptr, k, n, K, N)
        y = tl.dot(load_tile(x_ptr, m, k, M, K), v, y, input_precision=PRECISION)
    store_tile(y_ptr, y, m, n, M, N)


def multiply(x, v, turn):
    (M, K), N, tiles = x.shape, v.shape[0] if turn else v.shape[1], tiling(x)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    product_kernel[grid](x, v, y, M, N, K, TURN=turn, **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def dropconnect_linear(x, w, p, seed):
    """x: (M, K); w: (N, K)."""
    if x.shape[1] != w.shape[1] or not 0 <= p < 1:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit, or p = {p} is not below 1")
    return multiply(x.contiguous(), dropped(w.contiguous(), p, seed), True)


def reference(x, w, p, seed):
    keep = dropped(torch.ones(w.shape, device=w.device), p, seed) > 0
    return x @ torch.where(keep, w / (1 - p), 0.0).t()


SWEEP = [{"M": 8192, "K": 2048, "N": 2048}, {"M": 2003, "K": 1021, "N": 1500}]
SWEEP_CPU = [{"M": 27, "K": 40, "N": 36}, {"M": 50, "K": 17, "N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = (dims[name] for name in "MKN")
    x = torch.randn(M, K, device=device, dtype=dtype)
    return (x, torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5), {"p": 0.3, "seed": 20}


# ---- backward ----


@triton.jit
def dw_kernel(x_ptr, dy_ptr, dw_ptr, M, N, K, p, seed, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy = tl.trans(load_tile(dy_ptr, m, n, M, N))
        dw = tl.dot(dy, load_tile(x_ptr, m, k, M, K), dw, input_precision=PRECISION)
    dw = drop(dw, n[:, None].to(tl.int64) * K + k[None, :], p, seed)
    store_tile(dw_ptr, dw, n, k, N, K)


class DropConnectLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, p, seed):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.p, ctx.seed = p, seed
        return dropconnect_linear(x, w, p, seed)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (M, K), N, tiles, dy = x.shape, w.shape[0], tiling(x), dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = multiply(dy, dropped(w, ctx.p, ctx.seed), False)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            grid = (triton.cdiv(N, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))
            dw_kernel[grid](x, dy, dw, M, N, K, ctx.p, ctx.seed, **tiles)
        return dx, dw, None, None


def dropconnect_linear_autograd(x, w, p, seed):
    return DropConnectLinear.apply(x, w, p, seed)
