"""Monarch matrix: two block-diagonal factors with a transposition between, in place of a dense weight.

Forward    a row x of p q numbers is a p x q matrix X;   U_is = sum_j X_ij R_ijs  for each row i,
           Y_so = sum_i U_is L_sio  for each column s;   R (p, q, S), L (S, p, O); y has S O numbers
Backward   dL_sio = sum over rows of U_is dY_so,   dU_is = sum_o dY_so L_sio,
           dR_ijs = sum over rows of X_ij dU_is,   dX_ij = sum_s dU_is R_ijs

Forward schedule: each stage is a batch of small products, over the blocks, with M rows on one side. The
transposition between the stages is no pass of its own: the first stage stores U where the second will read
it, as (M, S, p), so that every load of a product is along contiguous numbers and one store is not.
Backward schedule: U is made again by the first stage, which costs a fraction of what a dense layer would and
saves M S p numbers. Then four batches of products, two for each stage, by the same kernel: it takes the
strides of three operands, (block, row, column) each, and so reads a factor transposed, sums over the M rows
for a weight, and stores dU as (M, p, S), transposed back for its two readers. A weight's block belongs to one
owner a tile, who walks all rows; the blocks are many enough to fill a GPU.

op: monarch_linear
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def block_product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_cb, stride_cm, stride_cn, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """C_b = A_b B_b for every block b."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(2).to(tl.int64)
    c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr + block * stride_ab, m, k, M, K, stride_am, stride_ak)
        b = load_tile(b_ptr + block * stride_bb, k, n, K, N, stride_bk, stride_bn)
        c = tl.dot(a, b, c, input_precision=PRECISION)
    offs = block * stride_cb + m[:, None].to(tl.int64) * stride_cm + n[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptr + offs, c.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def block_product(a, b, c):
    """C_b = A_b B_b; a (blocks, M, K), b (blocks, K, N) and c (blocks, M, N) are views of any strides."""
    blocks, M, K = a.shape
    N, BLOCK = b.shape[2], 32  # blocks are about the root of a layer's width
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK), blocks)
    block_product_kernel[grid](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), PRECISION=PRECISION, BLOCK=BLOCK
    )
    return c


def first_stage(x, r):
    """U of every row, as (M, S, p)."""
    (M, p, _), S = x.shape, r.shape[2]
    u = torch.empty((M, S, p), device=x.device, dtype=x.dtype)
    block_product(x.permute(1, 0, 2), r, u.permute(2, 0, 1))
    return u


@autodiff(inputs_require_grad=(0, 1, 2))
def monarch(x, r, l):
    """x: (M, p q); r: (p, q, S); l: (S, p, O); gives (M, S O)."""
    (p, q, S), O = r.shape, l.shape[2]
    if x.shape[1] != p * q or l.shape[:2] != (S, p):
        raise ValueError(f"x {tuple(x.shape)}, r {tuple(r.shape)} and l {tuple(l.shape)} do not fit")
    M = x.shape[0]
    u = first_stage(x.contiguous().view(M, p, q), r)
    y = torch.empty((M, S, O), device=x.device, dtype=x.dtype)
    block_product(u.permute(1, 0, 2), l, y.permute(1, 0, 2))
    return y.view(M, S * O)


def reference(x, r, l):
    u = torch.einsum("mij,ijs->mis", x.unflatten(1, r.shape[:2]), r)
    return torch.einsum("mis,sio->mso", u, l).flatten(1)


SWEEP = [
    {"M": 16384, "p": 64, "q": 64, "S": 64, "O": 64},
    {"M": 8191, "p": 24, "q": 32, "S": 40, "O": 30},
]
SWEEP_CPU = [{"M": 20, "p": 4, "q": 16, "S": 5, "O": 9}, {"M": 37, "p": 3, "q": 7, "S": 2, "O": 35}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, p, q, S, O = (dims[name] for name in ("M", "p", "q", "S", "O"))
    x = torch.randn(M, p * q, device=device, dtype=dtype)
    r = torch.randn(p, q, S, device=device, dtype=dtype) / max(1, q) ** 0.5
    return x, r, torch.randn(S, p, O, device=device, dtype=dtype) / max(1, p) ** 0.5


# ---- backward ----


class Monarch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, l):
        x = x.contiguous()
        ctx.save_for_backward(x, r, l)
        return monarch(x, r, l)

    @staticmethod
    def backward(ctx, dy):
        x, r, l = ctx.saved_tensors
        (p, q, S), O, M, needs = r.shape, l.shape[2], x.shape[0], ctx.needs_input_grad
        x, by_column = x.view(M, p, q), dy.contiguous().view(M, S, O).permute(1, 0, 2)
        dx = dr = dl = None
        if needs[2]:
            dl = torch.empty(l.shape, device=l.device, dtype=l.dtype)
            block_product(first_stage(x, r).permute(1, 2, 0), by_column, dl)
        if needs[0] or needs[1]:
            du = torch.empty((M, p, S), device=x.device, dtype=x.dtype)
            block_product(by_column, l.transpose(1, 2), du.permute(2, 0, 1))
        if needs[0]:
            dx = torch.empty((M, p, q), device=x.device, dtype=x.dtype)
            block_product(du.permute(1, 0, 2), r.transpose(1, 2), dx.permute(1, 0, 2))
            dx = dx.view(M, p * q)
        if needs[1]:
            dr = torch.empty(r.shape, device=r.device, dtype=r.dtype)
            block_product(x.permute(1, 2, 0), du.permute(1, 0, 2), dr)
        return dx, dr, dl


def monarch_autograd(x, r, l):
    return Monarch.apply(x, r, l)
