"""Complex matrix product, real and imaginary parts in tensors of their own.

Forward    C = A B:   Cr = Ar Br - Ai Bi,   Ci = Ar Bi + Ai Br
Backward   with dA = dAr + i dAi and so on:   dA = dC conj(B)^T,   dB = conj(A)^T dC; written out
           dAr = dCr Br^T + dCi Bi^T,   dAi = dCi Br^T - dCr Bi^T,
           dBr = Ar^T dCr + Ai^T dCi,   dBi = Ar^T dCi - Ai^T dCr

Forward schedule: a program owns a tile of C, both parts, in two accumulators: each of the four tiles that it
loads a step is used by two of the four dots, where two real products for each part would load them twice.
Backward schedule: both gradients are complex products as well, with a transposed factor and a conjugated one.
A transposition is two strides exchanged; a conjugation turns the sign of one imaginary part, a
negation of a tile, exact in every dtype. So the forward's kernel, told strides and signs, is the
whole backward: one launch for dAr with dAi, one for dBr with dBi, each with owners of its own tiles.

op: complex_matmul
schedule: swap_owner
difficulty: 3
dtypes: fp32, fp16, bf16
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
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def complex_kernel(
    ar_ptr, ai_ptr, br_ptr, bi_ptr, cr_ptr, ci_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    CONJ_A: tl.constexpr, CONJ_B: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cr = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    ci = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        ar = load_tile(ar_ptr, m, k, M, K, stride_am, stride_ak)
        ai = load_tile(ai_ptr, m, k, M, K, stride_am, stride_ak)
        br = load_tile(br_ptr, k, n, K, N, stride_bk, stride_bn)
        bi = load_tile(bi_ptr, k, n, K, N, stride_bk, stride_bn)
        if CONJ_A:
            ai = -ai
        if CONJ_B:
            bi = -bi
        cr = tl.dot(ar, br, cr, input_precision=PRECISION)
        cr = tl.dot(ai, -bi, cr, input_precision=PRECISION)
        ci = tl.dot(ar, bi, ci, input_precision=PRECISION)
        ci = tl.dot(ai, br, ci, input_precision=PRECISION)
    mask = (m[:, None] < M) & (n[None, :] < N)
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(cr_ptr + offs, cr.to(cr_ptr.dtype.element_ty), mask=mask)
    tl.store(ci_ptr + offs, ci.to(ci_ptr.dtype.element_ty), mask=mask)


def product(ar, ai, br, bi, CONJ_A=False, CONJ_B=False):
    """Both parts of A B, in new tensors; views of any strides, equal ones for the parts of a factor."""
    (M, K), N, tiles = ar.shape, br.shape[1], tiling(ar)
    cr, ci = (torch.empty((M, N), device=ar.device, dtype=ar.dtype) for _ in range(2))
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    complex_kernel[grid](
        ar, ai, br, bi, cr, ci, M, N, K, *ar.stride(), *br.stride(), CONJ_A=CONJ_A, CONJ_B=CONJ_B, **tiles
    )
    return cr, ci


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def complex_matmul(ar, ai, br, bi):
    """ar, ai: (M, K); br, bi: (K, N); gives both parts, (M, N) each."""
    if ar.shape != ai.shape or br.shape != bi.shape or ar.shape[1] != br.shape[0]:
        raise ValueError(f"A {tuple(ar.shape)}, {tuple(ai.shape)}; B {tuple(br.shape)}, {tuple(bi.shape)}")
    return product(ar.contiguous(), ai.contiguous(), br.contiguous(), bi.contiguous())


def reference(ar, ai, br, bi):
    return ar @ br - ai @ bi, ar @ bi + ai @ br


SWEEP = [{"M": 2048, "K": 2048, "N": 2048}, {"M": 4095, "K": 500, "N": 1000}]
SWEEP_CPU = [{"M": 24, "K": 30, "N": 22}, {"M": 9, "K": 35, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = dims["M"], dims["K"], dims["N"]
    ar, ai = (torch.randn(M, K, device=device, dtype=dtype) / max(1, K) ** 0.25 for _ in range(2))
    br, bi = (torch.randn(K, N, device=device, dtype=dtype) / max(1, K) ** 0.25 for _ in range(2))
    return ar, ai, br, bi


# ---- backward ----


class ComplexMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ar, ai, br, bi):
        ar, ai, br, bi = ar.contiguous(), ai.contiguous(), br.contiguous(), bi.contiguous()
        ctx.save_for_backward(ar, ai, br, bi)
        return complex_matmul(ar, ai, br, bi)

    @staticmethod
    def backward(ctx, dcr, dci):
        ar, ai, br, bi = ctx.saved_tensors
        dcr, dci, needs = dcr.contiguous(), dci.contiguous(), ctx.needs_input_grad
        dar = dai = dbr = dbi = None
        if needs[0] or needs[1]:
            dar, dai = product(dcr, dci, br.t(), bi.t(), CONJ_B=True)
        if needs[2] or needs[3]:
            dbr, dbi = product(ar.t(), ai.t(), dcr, dci, CONJ_A=True)
        grads = (dar, dai, dbr, dbi)
        return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


def complex_matmul_autograd(ar, ai, br, bi):
    return ComplexMatmul.apply(ar, ai, br, bi)
