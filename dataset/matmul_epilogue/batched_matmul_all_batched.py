"""Batched matrix product in which both factors have the batch dimension.

Forward    C_b = A_b B_b,   A (B, M, K), B (B, K, N)
Backward   dA_b = dC_b B_b^T,   dB_b = A_b^T dC_b

Forward schedule: a program owns (batch, tile of C) and walks K.
Backward schedule: the batch is a label, nothing crosses it, so both gradients are batched products again,
with dC's two dimensions and K in changed roles. Each gradient's tiles get owners of their own, (batch,
tile), who walk the dimension that is summed over, N or M. One kernel that takes strides makes all three
products: a transposed factor is the same storage with two strides exchanged, so nothing is copied, and views
that arrive transposed (K of an attention, or heads standing behind tokens) are read where they are. No split
of a long sum is needed while batch times tiles fill the GPU.

op: bmm
schedule: swap_owner
difficulty: 2
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
def bmm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK)
    m = tl.program_id(0) // tiles_n * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0) % tiles_n * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1).to(tl.int64)
    c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr + batch * stride_ab, m, k, M, K, stride_am, stride_ak)
        b = load_tile(b_ptr + batch * stride_bb, k, n, K, N, stride_bk, stride_bn)
        c = tl.dot(a, b, c, input_precision=PRECISION)
    offs = (batch * M + m[:, None]) * N + n[None, :]
    tl.store(c_ptr + offs, c.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def product(a, b):
    """A_b B_b of any strided views, in a new contiguous tensor."""
    (B, M, K), N, tiles = a.shape, b.shape[2], tiling(a)
    c = torch.empty((B, M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]) * triton.cdiv(N, tiles["BLOCK"]), B)
    bmm_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), **tiles)
    return c


@autodiff(inputs_require_grad=(0, 1))
def bmm(a, b):
    """a: (B, M, K); b: (B, K, N); gives (B, M, N)."""
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    return product(a, b)


def reference(a, b):
    return torch.bmm(a, b)


SWEEP = [{"B": 64, "M": 1024, "K": 64, "N": 1024}, {"B": 96, "M": 700, "K": 513, "N": 130}]
SWEEP_CPU = [{"B": 3, "M": 21, "K": 34, "N": 27}, {"B": 2, "M": 65, "K": 16, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, K, N = (dims[name] for name in ("B", "M", "K", "N"))
    a = torch.randn(B, M, K, device=device, dtype=dtype)
    return a, torch.randn(B, K, N, device=device, dtype=dtype)


# ---- backward ----


class BMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return bmm(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        da = product(dc, b.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        db = product(a.transpose(1, 2), dc) if ctx.needs_input_grad[1] else None
        return da, db


def bmm_autograd(a, b):
    return BMM.apply(a, b)
