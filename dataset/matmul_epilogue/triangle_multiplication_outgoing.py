"""Triangle multiplication on outgoing edges, a matrix product a channel with the channels last.

Forward    O_ijc = sum_k A_ikc B_jkc
Backward   dA_ikc = sum_j dO_ijc B_jkc,   dB_jkc = sum_i dO_ijc A_ikc

Forward schedule: a program owns (channel, tile of i, tile of j) and walks k. A channel's matrix lies in
memory with a step of C numbers, so a tile of one touches as many cache lines as a tile of all: the channel is
the fastest axis of the grid, so that the programs that share lines run side by side and the lines come from
memory once.
Backward schedule: in the three products each letter pair sums over the third letter, so all are one kernel,
out_rs = sum_t left_rt right_ts, told by strides which axis of each tensor is which. dA and dB have owners of
their own tiles and are stored once; nothing is transposed in memory, no atomics, and each of the two launches
only where its gradient is wanted.

op: triangle_multiplication
schedule: swap_owner
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
def channel_product_kernel(
    left_ptr, right_ptr, out_ptr, R, S, T, C,
    stride_lr, stride_lt, stride_rt, stride_rs, stride_or, stride_os,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out_rs = sum_t left_rt right_ts for one channel; channels lie side by side in all three."""
    channel = tl.program_id(0) % C
    tile = tl.program_id(0) // C
    columns = tl.cdiv(S, BLOCK)
    r = (tile // columns * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    s = (tile % columns * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    out = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = (start + tl.arange(0, BLOCK)).to(tl.int64)
        left_offs = r[:, None] * stride_lr + t[None, :] * stride_lt + channel
        right_offs = t[:, None] * stride_rt + s[None, :] * stride_rs + channel
        left = tl.load(left_ptr + left_offs, mask=(r[:, None] < R) & (t[None, :] < T), other=0.0)
        right = tl.load(right_ptr + right_offs, mask=(t[:, None] < T) & (s[None, :] < S), other=0.0)
        out = tl.dot(left, right, out, input_precision=PRECISION)
    out_offs = r[:, None] * stride_or + s[None, :] * stride_os + channel
    mask = (r[:, None] < R) & (s[None, :] < S)
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def channel_product(left, right):
    """(R, S, C) from (R, T, C) and (T, S, C), whose first two axes may be swapped in memory."""
    (R, T, C), S, tiles = left.shape, right.shape[1], tiling(left)
    out = torch.empty((R, S, C), device=left.device, dtype=left.dtype)
    programs = C * triton.cdiv(R, tiles["BLOCK"]) * triton.cdiv(S, tiles["BLOCK"])
    strides = (stride for tensor in (left, right, out) for stride in tensor.stride()[:2])
    channel_product_kernel[(programs,)](left, right, out, R, S, T, C, *strides, **tiles)
    return out


@autodiff(inputs_require_grad=(0, 1))
def triangle_multiplication(a, b):
    """a: (I, K, C); b: (J, K, C), of a pair representation I = J = K; out: (I, J, C)."""
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} must agree but for their first size")
    return channel_product(a.contiguous(), b.contiguous().transpose(0, 1))


def reference(a, b):
    return torch.einsum("ikc,jkc->ijc", a, b)


SWEEP = [{"I": 384, "J": 384, "K": 384, "C": 128}, {"I": 499, "J": 257, "K": 301, "C": 100}]
SWEEP_CPU = [{"I": 19, "J": 19, "K": 19, "C": 6}, {"I": 35, "J": 20, "K": 41, "C": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    I, J, K, C = (dims[name] for name in ("I", "J", "K", "C"))
    a = torch.randn(I, K, C, device=device, dtype=dtype)
    return a, torch.randn(J, K, C, device=device, dtype=dtype)


# ---- backward ----


class TriangleMultiplication(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return triangle_multiplication(a, b)

    @staticmethod
    def backward(ctx, do):
        a, b = ctx.saved_tensors
        do = do.contiguous()
        da = channel_product(do, b) if ctx.needs_input_grad[0] else None
        db = channel_product(do.transpose(0, 1), a) if ctx.needs_input_grad[1] else None
        return da, db


def triangle_multiplication_autograd(a, b):
    return TriangleMultiplication.apply(a, b)
