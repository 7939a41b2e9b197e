"""Weighted pooling of overlapping blocks of tokens: the compressed keys and values of sparse attention.

Forward    y_b = sum_{k < K} w_k x_{bS + k},  blocks b = 0 .. (T - K) / S, so that every block is whole
Backward   dx_t = sum over the blocks b with 0 <= t - bS < K of w_{t - bS} dy_b;
           dw_k = sum over b of <dy_b, x_{bS + k}>

Forward schedule: a program owns (sequence, tile of blocks, tile of channels) and walks the K taps.
Backward schedule: token t is in the blocks from ceil((t - K + 1) / S) to t / S, at most ceil(K / S) of them,
so its owner gathers them and stores once. dw is K numbers summed over everything: a program owns (sequence,
tile of blocks), keeps the products of a tap in a tile, walks all channels for it, reduces the tile to one
number and stores that; a second kernel adds the parts. The taps are walked outside the channels, as one tile
of dy serves a tap and comes from cache for the next.

op: window_pool
schedule: gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 16, "BLOCK_D": 64}


@triton.jit
def load_rows(ptr, rows, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def window_pool_kernel(
    x_ptr, w_ptr, y_ptr, T, D, blocks, K, S, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for k in range(K):
        y += tl.load(w_ptr + k).to(tl.float32) * load_rows(x_ptr + n * T * D, b * S + k, b < blocks, d, D)
    mask = (b[:, None] < blocks) & (d[None, :] < D)
    offs = (n * blocks + b[:, None]) * D + d[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def window_pool(x, w, S):
    """x: (N, T, D); w: (K); S: the step between blocks; gives (N, (T - K) // S + 1, D)."""
    (N, T, D), K = x.shape, w.numel()
    if K > T or S < 1:
        raise ValueError(f"no block of {K} tokens every {S} in {T}")
    blocks = (T - K) // S + 1
    y = torch.empty((N, blocks, D), device=x.device, dtype=x.dtype)
    grid = (N, triton.cdiv(blocks, TILE["BLOCK_T"]), triton.cdiv(D, TILE["BLOCK_D"]))
    window_pool_kernel[grid](x.contiguous(), w.contiguous(), y, T, D, blocks, K, S, **TILE)
    return y


def reference(x, w, S):
    return torch.einsum("nbdk,k->nbd", x.unfold(1, w.numel(), S), w)


SWEEP = [
    {"N": 32, "T": 8192, "D": 128, "K": 32, "S": 16},
    {"N": 7, "T": 6007, "D": 200, "K": 20, "S": 7},
]
SWEEP_CPU = [
    {"N": 2, "T": 61, "D": 24, "K": 8, "S": 4},
    {"N": 1, "T": 23, "D": 67, "K": 3, "S": 5},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    K = min(dims["K"], dims["T"])
    x = torch.randn(dims["N"], dims["T"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(K, device=device, dtype=dtype) / max(1, K) ** 0.5, max(1, dims["S"])


# ---- backward ----


@triton.jit
def dx_kernel(
    w_ptr, dy_ptr, dx_ptr, T, D, blocks, K, S, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    dx = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for back in range(tl.cdiv(K, S)):
        b = t // S - back
        inside = (b >= 0) & (b < blocks) & (t - b * S < K)
        w = tl.load(w_ptr + t - b * S, mask=inside, other=0.0).to(tl.float32)
        dx += w[:, None] * load_rows(dy_ptr + n * blocks * D, b, inside, d, D)
    mask = (t[:, None] < T) & (d[None, :] < D)
    tl.store(dx_ptr + (n * T + t[:, None]) * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, part_ptr, T, D, blocks, K, S, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = part_ptr + (n * tl.num_programs(1) + tl.program_id(1)) * K
    for k in range(K):
        products = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            dy = load_rows(dy_ptr + n * blocks * D, b, b < blocks, d, D)
            products += dy * load_rows(x_ptr + n * T * D, b * S + k, b < blocks, d, D)
        tl.store(part + k, tl.sum(products))


@triton.jit
def weight_sum_kernel(part_ptr, dw_ptr, parts, K, BLOCK: tl.constexpr):
    k = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        acc += tl.load(part_ptr + i * K + k, mask=i < parts, other=0.0)
    tl.store(dw_ptr + k, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty))


class WindowPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, S):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.S = S
        return window_pool(x, w, S)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        (N, T, D), K, blocks = x.shape, w.numel(), dy.shape[1]
        sizes = (T, D, blocks, K, ctx.S)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (N, triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(D, TILE["BLOCK_D"]))
            dx_kernel[grid](w, dy, dx, *sizes, **TILE)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            tiles = triton.cdiv(blocks, TILE["BLOCK_T"])
            part = torch.empty((N * tiles, K), device=x.device, dtype=torch.float32)
            weight_parts_kernel[(N, tiles)](x, dy, part, *sizes, **TILE)
            weight_sum_kernel[(K,)](part, dw, N * tiles, K, BLOCK=256)
        return dx, dw, None


def window_pool_autograd(x, w, S):
    return WindowPool.apply(x, w, S)
