"""Layer norm of few and very long rows, such as whole images, with a weight for every place.

Forward    xhat = (x - mu) rstd,   y = xhat w + b;   x (M, N), w, b (N)
Backward   with g = dy w:   c0 = mean g,  c1 = mean(g xhat),   dx = rstd (g - c0 - xhat c1),
           dw = sum over rows of dy xhat,   db = sum over rows of dy

Forward schedule: a row is shared by many programs. (Chunk, row) owners store mean and squared deviations of
their chunk; one program a row merges them (Chan's rule); then owners of tiles of columns write y.
Backward schedule: (chunk, row) owners store their shares of c0 and c1, and one program a row adds them. The
last step belongs to columns: the owner of a tile of columns walks all rows, of which there are few. It writes
dx tile by tile, and as it sees every row of its columns, dw and db are complete in its registers at the end:
the parameters' gradients need no pass, no slots and no atomics of their own. For many short rows it is the
other way round, c0 and c1 are cheap and dw is the long sum.

op: layer_norm
schedule: partials_then_reduce, row_reduce_correct, swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024
CHUNK = 4096  # numbers of a row for one program


@triton.jit
def chunk_moments_kernel(x_ptr, mean_ptr, dev_ptr, N, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.minimum((chunk + 1) * CHUNK, N)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(chunk * CHUNK, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * N + i, mask=i < end, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / (end - chunk * CHUNK)
    dev = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(chunk * CHUNK, end, BLOCK):  # the chunk is still in cache
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + i, mask=i < end, other=0.0).to(tl.float32)
        centred = tl.where(i < end, x - mean, 0.0)
        dev += centred * centred
    slot = row * tl.num_programs(0) + chunk
    tl.store(mean_ptr + slot, mean)
    tl.store(dev_ptr + slot, tl.sum(dev, axis=0))


@triton.jit
def merge_kernel(mean_ptr, dev_ptr, mu_ptr, rstd_ptr, N, chunks, eps, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mu, squares = 0.0, 0.0
    for chunk in range(chunks):
        slot = row * chunks + chunk
        count = tl.minimum(CHUNK, N - chunk * CHUNK).to(tl.float32)
        step = tl.load(mean_ptr + slot) - mu
        share = count / (chunk * CHUNK + count)
        squares += tl.load(dev_ptr + slot) + step * step * (chunk * CHUNK * share)
        mu += step * share
    tl.store(mu_ptr + row, mu)
    tl.store(rstd_ptr + row, tl.rsqrt(squares / N + eps))


@triton.jit
def normalise_kernel(x_ptr, w_ptr, b_ptr, mu_ptr, rstd_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    x = tl.load(x_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    y = (x - tl.load(mu_ptr + row)) * tl.load(rstd_ptr + row) * w + b
    tl.store(y_ptr + row * N + i, y.to(y_ptr.dtype.element_ty), mask=i < N)


def long_layer_norm_forward(x, w, b, eps):
    M, N = x.shape
    if w.shape != (N,) or b.shape != (N,) or not 0 < N < 2**31 - CHUNK:
        raise ValueError(f"rows of {N} with w {tuple(w.shape)} and b {tuple(b.shape)}")
    chunks, y = triton.cdiv(N, CHUNK), torch.empty_like(x)
    mu, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    means, devs = (torch.empty((M, chunks), device=x.device, dtype=torch.float32) for _ in range(2))
    chunk_moments_kernel[(chunks, M)](x, means, devs, N, CHUNK=CHUNK, BLOCK=BLOCK)
    merge_kernel[(M,)](means, devs, mu, rstd, N, chunks, eps, CHUNK=CHUNK)
    normalise_kernel[(triton.cdiv(N, BLOCK), M)](x, w, b, mu, rstd, y, N, BLOCK=BLOCK)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def long_layer_norm(x, w, b, eps=1e-5):
    """x: (M, N); w, b: (N)."""
    return long_layer_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, eps)


SWEEP = [{"M": 32, "N": 1048576}, {"M": 5, "N": 3000001}]
SWEEP_CPU = [{"M": 5, "N": 1000}, {"M": 3, "N": 9100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x = 0.5 + 2 * torch.randn(M, N, device=device, dtype=dtype)
    w, b = (torch.randn(N, device=device, dtype=dtype) for _ in range(2))
    return x, 1 + 0.2 * w, b


# ---- backward ----


@triton.jit
def chunk_sums_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, c0_ptr, c1_ptr, N, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    mu, rstd = tl.load(mu_ptr + row), tl.load(rstd_ptr + row)
    end = tl.minimum((chunk + 1) * CHUNK, N)
    c0 = tl.zeros([BLOCK], dtype=tl.float32)
    c1 = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(chunk * CHUNK, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + i, mask=i < end, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * N + i, mask=i < end, other=0.0).to(tl.float32) * w
        c0 += g
        c1 += g * (x - mu) * rstd
    slot = row * tl.num_programs(0) + chunk
    tl.store(c0_ptr + slot, tl.sum(c0, axis=0))
    tl.store(c1_ptr + slot, tl.sum(c1, axis=0))


@triton.jit
def mean_kernel(slots_ptr, mean_ptr, N, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(slots_ptr + row * chunks + i, mask=i < chunks, other=0.0)
    tl.store(mean_ptr + row, tl.sum(total, axis=0) / N)


@triton.jit
def column_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, c0_ptr, c1_ptr, dx_ptr, dw_ptr, db_ptr, M, N, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    offs = i
    for row in range(M):
        rstd = tl.load(rstd_ptr + row)
        x = tl.load(x_ptr + offs, mask=i < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=i < N, other=0.0).to(tl.float32)
        xhat = (x - tl.load(mu_ptr + row)) * rstd
        dx = rstd * (dy * w - tl.load(c0_ptr + row) - xhat * tl.load(c1_ptr + row))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=i < N)
        dw += dy * xhat
        db += dy
        offs += N
    tl.store(dw_ptr + i, dw.to(dw_ptr.dtype.element_ty), mask=i < N)
    tl.store(db_ptr + i, db.to(db_ptr.dtype.element_ty), mask=i < N)


class LongLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w = x.contiguous(), w.contiguous()
        y, mu, rstd = long_layer_norm_forward(x, w, b.contiguous(), eps)
        ctx.save_for_backward(x, w, mu, rstd)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        dy, (M, N), needs = dy.contiguous(), x.shape, ctx.needs_input_grad
        chunks = triton.cdiv(N, CHUNK)
        slots = torch.empty((2, M, chunks), device=x.device, dtype=torch.float32)
        c = torch.empty((2, M), device=x.device, dtype=torch.float32)
        chunk_sums_kernel[(chunks, M)](x, w, mu, rstd, dy, slots[0], slots[1], N, CHUNK=CHUNK, BLOCK=BLOCK)
        mean_kernel[(2 * M,)](slots, c, N, chunks, BLOCK=128)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
        column_kernel[(triton.cdiv(N, 512),)](x, w, mu, rstd, dy, c[0], c[1], dx, dw, db, M, N, BLOCK=512)
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


def long_layer_norm_autograd(x, w, b, eps=1e-5):
    return LongLayerNorm.apply(x, w, b, eps)
