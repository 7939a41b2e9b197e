"""Attention pooling: R learned queries a head turn a set of any size into R vectors.

Forward    a batch entry, a head, its first L = len[b] tokens:  P = softmax(s W X^T),  O = P X;
           X is key and value at once, W is (R, dim) and the same for all of the batch; O = 0 where L = 0
Backward   dS = P * (dO X^T - delta),  delta_r = <dO_r, O_r>,
           dX = P^T dO + s dS^T W  (as value and as key),   dW = s sum over batch of dS X

Forward schedule: a program owns (batch entry, head): R queries fit one tile, and it walks the tokens with an
online softmax. lse is saved, in units of log2, and O in float32, few numbers: where one token has nearly all
of P, dS is a difference of nearly equal numbers, and a delta of rounded O would be all of it.
Backward schedule: the ownership is kept, for the program meets each token of its set once, and nobody else
does. One load of a tile of X serves the scores, dO X^T and dW; both of its roles are dots into one register
tile, and dX is stored once, where two owners would have to be added. dW gathers in registers over the set and
is stored as a part; a second kernel adds the parts of the batch. Sets are many where pooling is used, so
there is a program for each multiprocessor; few large sets would want to be split as well. Tokens beyond L get
zeros.

op: attention_pool
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(x, w):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_R, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in w.shape[1:])
    BLOCK = 32 if x.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_R": BLOCK_R, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, d, R, D, stride):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, R, D, stride):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def pool_kernel(
    x_ptr, w_ptr, len_ptr, o_ptr, exact_ptr, lse_ptr, N, H, R, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    L = tl.minimum(tl.load(len_ptr + b), N)
    x_ptr += (b * N * H + h) * D
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    w = load_tile(w_ptr + h * R * D, r, d, R, D, D)
    m = tl.full([BLOCK_R], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, n, d, L, D, H * D)
        s = tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale_log2
        s = tl.where(n[None, :] < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(x.dtype), x, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(total > 0.0, total, 1.0)  # an empty set
    o, at = acc / total[:, None], (b * H + h) * R * D
    store_tile(o_ptr + at, o, r, d, R, D, D)
    store_tile(exact_ptr + at, o, r, d, R, D, D)
    tl.store(lse_ptr + (b * H + h) * R + r, m + tl.log2(total), mask=r < R)


def pool_forward(x, w, length):
    (B, N, H, D), R = x.shape, w.shape[1]
    if w.shape != (H, R, D) or length.shape != (B,):
        raise ValueError("w or length do not fit x")
    if R > 64 or D > 128:
        raise ValueError(f"{R} queries of dimension {D} do not fit one tile")
    o = x.new_empty((B, H, R, D))
    exact, lse = torch.empty_like(o, dtype=torch.float32), o.new_empty((B, H, R), dtype=torch.float32)
    pool_kernel[(B, H)](x, w, length, o, exact, lse, N, H, R, D, D**-0.5 * LOG2E, **tiling(x, w))
    return o, exact, lse


@autodiff(inputs_require_grad=(0, 1))
def attention_pool(x, w, length):
    """x: (batch, tokens, heads, dim); w: (heads, R, dim), R up to 64; length: int64 (batch), tokens of each;
    gives (batch, heads, R, dim).
    """
    return pool_forward(x.contiguous(), w.contiguous(), length.contiguous())[0]


def reference(x, w, length):
    x = x.transpose(1, 2)
    real = (torch.arange(x.shape[2], device=x.device) < length[:, None])[:, None, None, :]
    s = (x.shape[-1] ** -0.5 * w @ x.transpose(-1, -2)).masked_fill(~real, -1e30)
    return (torch.softmax(s, dim=-1) * real) @ x


SWEEP = [
    {"B": 128, "N": 512, "H": 8, "R": 16, "D": 64},
    {"B": 61, "N": 777, "H": 6, "R": 1, "D": 128},
]
SWEEP_CPU = [
    {"B": 3, "N": 40, "H": 2, "R": 4, "D": 16},
    {"B": 2, "N": 9, "H": 1, "R": 17, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N, H, R, D = (dims[key] for key in ("B", "N", "H", "R", "D"))
    x = torch.randn(B, N, H, D, device=device, dtype=dtype)
    w = torch.randn(H, R, D, device=device, dtype=dtype)
    return x, w, torch.randint(N // 2, N + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def pool_backward_kernel(
    x_ptr, w_ptr, len_ptr, o_ptr, lse_ptr, do_ptr, dx_ptr, parts_ptr, N, H, R, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    L = tl.minimum(tl.load(len_ptr + b), N)
    x_at, o_at = (b * N * H + h) * D, (b * H + h) * R
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    w = load_tile(w_ptr + h * R * D, r, d, R, D, D)
    do = load_tile(do_ptr + o_at * D, r, d, R, D, D)
    o = load_tile(o_ptr + o_at * D, r, d, R, D, D)
    delta = tl.sum(do.to(tl.float32) * o, axis=1)
    lse = tl.load(lse_ptr + o_at + r, mask=r < R, other=float("inf"))
    dw = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):  # also beyond L, where P is 0 and so is dX
        n = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + x_at, n, d, L, D, H * D)
        s = tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale_log2
        p = tl.exp2(tl.where(n[None, :] < L, s - lse[:, None], -float("inf")))
        ds = p * (tl.dot(do, tl.trans(x), input_precision=PRECISION) - delta[:, None]) * scale
        dx = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        dx = tl.dot(tl.trans(ds.to(w.dtype)), w, dx, input_precision=PRECISION)
        dw = tl.dot(ds.to(x.dtype), x, dw, input_precision=PRECISION)
        store_tile(dx_ptr + x_at, dx, n, d, N, D, H * D)
    store_tile(parts_ptr + o_at * D, dw, r, d, R, D, D)


@triton.jit
def batch_sum_kernel(parts_ptr, dw_ptr, B, size, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_B, BLOCK], dtype=tl.float32)
    for start in range(0, B, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        mask = (b[:, None] < B) & (at[None, :] < size)
        offs = b[:, None].to(tl.int64) * size + at[None, :]
        acc += tl.load(parts_ptr + offs, mask=mask, other=0.0)
    tl.store(dw_ptr + at, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty), mask=at < size)


class AttentionPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, length):
        x, w, length = x.contiguous(), w.contiguous(), length.contiguous()
        o, exact, lse = pool_forward(x, w, length)
        ctx.save_for_backward(x, w, length, exact, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        x, w, length, o, lse = ctx.saved_tensors
        (B, N, H, D), R, needs = x.shape, w.shape[1], ctx.needs_input_grad
        dx, dw, parts = torch.empty_like(x), torch.empty_like(w), lse.new_empty((B, H, R, D))
        pool_backward_kernel[(B, H)](
            x, w, length, o, lse, do.contiguous(), dx, parts, N, H, R, D, D**-0.5, D**-0.5 * LOG2E,
            **tiling(x, w),
        )  # fmt: skip
        if needs[1]:
            size = H * R * D
            batch_sum_kernel[(triton.cdiv(size, 128),)](parts, dw, B, size, BLOCK_B=16, BLOCK=128)
        return dx if needs[0] else None, dw if needs[1] else None, None


def attention_pool_autograd(x, w, length):
    return AttentionPool.apply(x, w, length)
