"""Stream-K: a matrix product whose steps, not its tiles, are dealt out evenly.

Forward    C = A B,   A (M, K), B (K, N)
Backward   dA = dC B^T,   dB = A^T dC

Forward schedule: with a program a tile, 130 tiles on 128 multiprocessors take as long as 256. Here all tiles'
steps along K, laid end to end, are cut into as many equal ranges as there are programs. A program walks its
range: it ends the tile that another one has begun, makes some whole tiles, and begins one more. Whole tiles
are stored; of a shared tile each program adds its part by atomics, two or three programs a tile, into a
float32 buffer of zeros.
Backward schedule: both gradients are products with another long side each: dA sums over N, dB over M, and
tiles are cut from other dimensions. A schedule by tiles would have to be chosen anew for each of the three
shapes, as split or not split along the sum; equal ranges fit all of them. The one kernel takes strides, so a
transposed factor is read where it is. Additions of a shared tile come in any order, so the last bit is not
the same every time.

op: matmul
schedule: swap_owner, atomic_accumulate
difficulty: 5
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PROGRAMS = 264  # two a multiprocessor


def tiling(a):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if a.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def stream_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, share, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    steps, across = tl.cdiv(K, BLOCK), tl.cdiv(N, BLOCK)
    here = tl.program_id(0) * share
    end = tl.minimum(here + share, steps * across * tl.cdiv(M, BLOCK))
    while here < end:
        tile, first = here // steps, here % steps
        last = tl.minimum(steps, first + end - here)
        m = tile // across * BLOCK + tl.arange(0, BLOCK)
        n = tile % across * BLOCK + tl.arange(0, BLOCK)
        c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for step in range(first, last):
            k = step * BLOCK + tl.arange(0, BLOCK)
            a = load_tile(a_ptr, m, k, M, K, stride_am, stride_ak)
            b = load_tile(b_ptr, k, n, K, N, stride_bk, stride_bn)
            c = tl.dot(a, b, c, input_precision=PRECISION)
        mask = (m[:, None] < M) & (n[None, :] < N)
        offs = m[:, None].to(tl.int64) * N + n[None, :]
        if last - first == steps:
            tl.store(c_ptr + offs, c, mask=mask)
        else:
            tl.atomic_add(c_ptr + offs, c, mask=mask, sem="relaxed")
        here += last - first


def stream_product(a, b):
    """A B of any strided views, in a new contiguous tensor of A's dtype."""
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    c = torch.zeros((M, N), device=a.device, dtype=torch.float32)
    total = triton.cdiv(M, tiles["BLOCK"]) * triton.cdiv(N, tiles["BLOCK"]) * triton.cdiv(K, tiles["BLOCK"])
    programs = min(total, PROGRAMS)
    share = triton.cdiv(total, max(1, programs))
    stream_kernel[(programs,)](a, b, c, M, N, K, share, *a.stride(), *b.stride(), **tiles)
    return c.to(a.dtype)


@autodiff(inputs_require_grad=(0, 1))
def stream_matmul(a, b):
    """a: (M, K); b: (K, N); gives (M, N)."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    return stream_product(a, b)


def reference(a, b):
    return a @ b


SWEEP = [{"M": 2048, "K": 2048, "N": 1152}, {"M": 1500, "K": 4001, "N": 700}]
SWEEP_CPU = [{"M": 70, "K": 90, "N": 50}, {"M": 20, "K": 33, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


class StreamMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return stream_matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        da = stream_product(dc, b.t()) if ctx.needs_input_grad[0] else None
        db = stream_product(a.t(), dc) if ctx.needs_input_grad[1] else None
        return da, db


def stream_matmul_autograd(a, b):
    return StreamMatmul.apply(a, b)
