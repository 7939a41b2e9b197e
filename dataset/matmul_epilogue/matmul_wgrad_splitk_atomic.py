"""Matrix product with many rows and a small right factor.

Forward    C = A B, with M much larger than K and N
Backward   dA = dC B^T,  dB = A^T dC, whose sum runs over the long axis M

Forward schedule: a program owns a tile of C and walks K.
Backward schedule: dA has M K / tile owners, enough for any device, and stays a plain product. dB has only K
N / tile tiles: its owners would walk all of M alone while most of the device idles. So M is split over
programs, and each adds its partial tile by atomics into a zeroed fp32 buffer, cast at the end. One add per
element and split, against a slot buffer and a second kernel; the price is an order of summation that may
change between runs.

op: matmul
schedule: atomic_accumulate, swap_owner
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling():
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32}


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (m[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (n[None, :] < N)
        a = tl.load(
            a_ptr + m[:, None].to(tl.int64) * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0
        )
        b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    c_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=c_mask)


def launch_matmul(a, b):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    matmul_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 32))](
        a, b, c, M, N, K, *a.stride(), *b.stride(), **tiling()
    )
    return c


@autodiff(inputs_require_grad=(0, 1))
def tall_matmul(a, b):
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    return launch_matmul(a, b)


def reference(a, b):
    return a @ b


SWEEP = [{"M": 262144, "K": 128, "N": 64}, {"M": 131072, "K": 64, "N": 96}, {"M": 100003, "K": 80, "N": 50}]
SWEEP_CPU = [{"M": 260, "K": 17, "N": 31}, {"M": 96, "K": 40, "N": 8}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    b = torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)
    return a, b


# ---- backward ----


@triton.jit
def db_kernel(
    a_ptr, dc_ptr, db_ptr, M, N, K, stride_am, stride_ak, rows_per_split,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * rows_per_split
    end = tl.minimum(begin + rows_per_split, M)
    acc = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        a_mask = (k[:, None] < K) & (m[None, :] < end)
        dc_mask = (m[:, None] < end) & (n[None, :] < N)
        a_t = tl.load(
            a_ptr + m[None, :].to(tl.int64) * stride_am + k[:, None] * stride_ak, mask=a_mask, other=0.0
        )
        dc = tl.load(dc_ptr + m[:, None].to(tl.int64) * N + n[None, :], mask=dc_mask, other=0.0)
        acc = tl.dot(a_t, dc, acc, input_precision=PRECISION)
    db_mask = (k[:, None] < K) & (n[None, :] < N)
    tl.atomic_add(db_ptr + k[:, None] * N + n[None, :], acc, mask=db_mask)


class TallMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return tall_matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        dc = dc.contiguous()
        M, K = a.shape
        N = b.shape[1]
        da = launch_matmul(dc, b.t()) if ctx.needs_input_grad[0] else None
        db = None
        if ctx.needs_input_grad[1]:
            tiles = triton.cdiv(K, 32) * triton.cdiv(N, 32)
            splits = max(1, min(triton.cdiv(M, 64), 256 // tiles))
            rows_per_split = triton.cdiv(max(M, 1), 64 * splits) * 64
            grid = (triton.cdiv(K, 32), triton.cdiv(N, 32), triton.cdiv(M, rows_per_split))
            db = torch.zeros((K, N), device=b.device, dtype=torch.float32)
            db_kernel[grid](a, dc, db, M, N, K, *a.stride(), rows_per_split, **tiling())
            db = db.to(b.dtype)
        return da, db


def tall_matmul_autograd(a, b):
    return TallMatmul.apply(a, b)
