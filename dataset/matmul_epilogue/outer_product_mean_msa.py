"""Outer product mean: an alignment's rows become features of each pair of its columns.

Forward    O_ijce = (1 / n_ij) sum_s a_sic b_sje k_si k_sj,   n_ij = 0.001 + sum_s k_si k_sj,   k a mask
Backward   G = dO / n:   da_sic = k_si sum_je G_ijce b_sje k_sj,   db_sje = k_sj sum_ic G_ijce a_sic k_si

Forward schedule: with (i, c) as one index p and (j, e) as one index q, this is a single product A^T B over
the rows s; the small axes c and e never become tiles of 16 on their own. A program owns a tile (p, q), walks
s with the masks applied on load, and divides by n, which a kernel of the same kind has made from the masks
alone, (N, N) numbers, an (ec)-th of O. It stores where (i, j, c, e) stands.
Backward schedule: n depends on no input with a gradient and is kept. da sums over all q and db over all p, so
each has an owner, (tile of s, tile of its own index), who walks the other index and makes G from dO and n on
load. It is one kernel: told with four strides which index of dO is the owner's, it makes either gradient. The
other's mask goes into the operand, the own mask onto the finished sum. Neither a permuted copy of dO nor G is
stored; dO is by far the largest tensor here.

op: outer_product_mean
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(a):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if a.dtype == torch.float32 else 64}


@triton.jit
def load_masked(ptr, mask_ptr, s, p, S, N, c):
    """Tile (s, p) of a (S, N c) tensor, with rows and columns of the alignment masked out."""
    inside = (s[:, None] < S) & (p[None, :] < N * c)
    keep = tl.load(mask_ptr + s[:, None] * N + p[None, :] // c, mask=inside, other=0)
    value = tl.load(ptr + s[:, None].to(tl.int64) * (N * c) + p[None, :], mask=inside, other=0.0)
    return tl.where(keep != 0, value, 0.0).to(value.dtype)


@triton.jit
def count_kernel(mask_ptr, n_ptr, S, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.zeros([BLOCK, BLOCK], dtype=tl.float32) + 0.001
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        rows = s[:, None] < S
        k_i = tl.load(mask_ptr + s[:, None] * N + i[None, :], mask=rows & (i[None, :] < N), other=0)
        k_j = tl.load(mask_ptr + s[:, None] * N + j[None, :], mask=rows & (j[None, :] < N), other=0)
        n = tl.dot(tl.trans(k_i.to(tl.float16)), k_j.to(tl.float16), n)  # 0 and 1 are exact
    tl.store(n_ptr + i[:, None] * N + j[None, :], n, mask=(i[:, None] < N) & (j[None, :] < N))


@triton.jit
def outer_mean_kernel(
    a_ptr, b_ptr, mask_ptr, n_ptr, o_ptr, S, N, c, e, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        a = load_masked(a_ptr, mask_ptr, s, p, S, N, c)
        b = load_masked(b_ptr, mask_ptr, s, q, S, N, e)
        o = tl.dot(tl.trans(a), b, o, input_precision=PRECISION)
    inside = (p[:, None] < N * c) & (q[None, :] < N * e)
    pair = (p // c)[:, None].to(tl.int64) * N + (q // e)[None, :]
    o = o / tl.load(n_ptr + pair, mask=inside, other=1.0)
    offs = pair * (c * e) + (p % c)[:, None] * e + (q % e)[None, :]
    tl.store(o_ptr + offs, o.to(o_ptr.dtype.element_ty), mask=inside)


def outer_product_mean_forward(a, b, k):
    (S, N, c), e, tiles = a.shape, b.shape[2], tiling(a)
    if b.shape[:2] != (S, N) or k.shape != (S, N):
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)} and mask {tuple(k.shape)} do not fit")
    n = torch.empty((N, N), device=a.device, dtype=torch.float32)
    o = torch.empty((N, N, c, e), device=a.device, dtype=a.dtype)
    count_kernel[(triton.cdiv(N, 32), triton.cdiv(N, 32))](k, n, S, N, BLOCK=32)
    grid = (triton.cdiv(N * c, tiles["BLOCK"]), triton.cdiv(N * e, tiles["BLOCK"]))
    outer_mean_kernel[grid](a, b, k, n, o, S, N, c, e, **tiles)
    return o, n


@autodiff(inputs_require_grad=(0, 1))
def outer_product_mean(a, b, k):
    """a: (S, N, c); b: (S, N, e); k: int8 (S, N), 0 or 1; gives (N, N, c, e)."""
    return outer_product_mean_forward(a.contiguous(), b.contiguous(), k.contiguous())[0]


def reference(a, b, k):
    k = k.to(a.dtype)
    n = 0.001 + k.t() @ k
    return torch.einsum("sic,sje->ijce", a * k[..., None], b * k[..., None]) / n[:, :, None, None]


SWEEP = [{"S": 256, "N": 256, "c": 32, "e": 32}, {"S": 127, "N": 190, "c": 16, "e": 24}]
SWEEP_CPU = [{"S": 9, "N": 13, "c": 4, "e": 3}, {"S": 35, "N": 5, "c": 7, "e": 8}]


def make_args(dims, device="cuda", dtype=torch.float32):
    S, N = dims["S"], dims["N"]
    a, b = (torch.randn(S, N, dims[name], device=device, dtype=dtype) for name in ("c", "e"))
    return a, b, (torch.rand(S, N, device=device) < 0.8).to(torch.int8)


# ---- backward ----


@triton.jit
def grad_kernel(
    do_ptr, other_ptr, mask_ptr, n_ptr, grad_ptr, S, N, own, oth, stride_own_col, stride_own, stride_oth_col,
    stride_oth, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient (S, N own) of one factor from the other, (S, N oth); strides of dO for both indices."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = own * oth
    grad = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N * oth, BLOCK):
        q = start + tl.arange(0, BLOCK)
        inside = (q[:, None] < N * oth) & (p[None, :] < N * own)
        pair = (q // oth)[:, None].to(tl.int64) * stride_oth_col + (p // own)[None, :] * stride_own_col
        offs = pair * size + (q % oth)[:, None] * stride_oth + (p % own)[None, :] * stride_own
        n = tl.load(n_ptr + pair, mask=inside, other=1.0)
        g = tl.load(do_ptr + offs, mask=inside, other=0.0).to(tl.float32) / n
        other = load_masked(other_ptr, mask_ptr, s, q, S, N, oth)
        grad = tl.dot(other, g.to(other.dtype), grad, input_precision=PRECISION)
    inside = (s[:, None] < S) & (p[None, :] < N * own)
    keep = tl.load(mask_ptr + s[:, None] * N + p[None, :] // own, mask=inside, other=0)
    grad = tl.where(keep != 0, grad, 0.0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + s[:, None].to(tl.int64) * (N * own) + p[None, :], grad, mask=inside)


class OuterProductMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, k):
        a, b, k = a.contiguous(), b.contiguous(), k.contiguous()
        o, n = outer_product_mean_forward(a, b, k)
        ctx.save_for_backward(a, b, k, n)
        return o

    @staticmethod
    def backward(ctx, do):
        a, b, k, n = ctx.saved_tensors
        do, (S, N, c), e, tiles = do.contiguous(), a.shape, b.shape[2], tiling(a)
        BLOCK = tiles["BLOCK"]
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            grid = (triton.cdiv(S, BLOCK), triton.cdiv(N * c, BLOCK))
            grad_kernel[grid](do, b, k, n, da, S, N, c, e, N, e, 1, 1, **tiles)
        if ctx.needs_input_grad[1]:
            db = torch.empty_like(b)
            grid = (triton.cdiv(S, BLOCK), triton.cdiv(N * e, BLOCK))
            grad_kernel[grid](do, a, k, n, db, S, N, e, c, 1, 1, N, e, **tiles)
        return da, db, None


def outer_product_mean_autograd(a, b, k):
    return OuterProductMean.apply(a, b, k)
