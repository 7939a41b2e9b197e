"""The activation of a top-k sparse autoencoder: a row's K largest numbers, if positive, and zeros elsewhere.

Forward    y_mn = x_mn where x_mn is among the K largest of row m and above 0, else 0; of equal numbers the
           first come first
Backward   dx_mn = dy_mn where y_mn > 0, 0 elsewhere

Forward schedule: a program owns a row in one tile. K rounds each take the maximum and its first position and
remove it from what is left; numbers that are positive and no longer left are the output.
Backward schedule: flat tiles, no rows. Which numbers were chosen stands in the output: chosen and positive is
y > 0, so neither indices nor a mask is saved, and there is nothing to choose again; a stored threshold would
have to be compared with x to the bit, and lets all of several equal numbers pass. y is what the decoder
behind it keeps anyway.

op: topk_relu
schedule: same_tile_pointwise, index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def topk_relu_kernel(x_ptr, y_ptr, N, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + n, mask=n < N, other=0.0).to(tl.float32)
    left = tl.where(x > 0, x, 0.0)
    for _ in range(K):
        top = tl.max(left, axis=0)
        first = tl.min(tl.where(left == top, n, BLOCK), axis=0)
        left = tl.where(n == first, 0.0, left)
    y = tl.where((x > 0) & (left == 0), x, 0.0)  # what the rounds have taken
    tl.store(y_ptr + row + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@autodiff(inputs_require_grad=(0,))
def topk_relu(x, K):
    """x: (..., N); K: how many of a row are kept at most."""
    x, N = x.contiguous(), x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, BLOCK = torch.empty_like(x), triton.next_power_of_2(N)
    topk_relu_kernel[(x.numel() // N,)](x, y, N, K, BLOCK=BLOCK, num_warps=4 if BLOCK < 8192 else 16)
    return y


def reference(x, K):
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    kept = torch.zeros_like(x, dtype=torch.bool).scatter(-1, order, True)
    return torch.where(kept & (x > 0), x, 0.0)


SWEEP = [{"M": 4096, "N": 16384, "K": 32}, {"M": 2047, "N": 6000, "K": 50}]
SWEEP_CPU = [{"M": 9, "N": 70, "K": 5}, {"M": 31, "N": 16, "K": 12}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["M"], dims["N"], device=device, dtype=dtype), dims["K"]


# ---- backward ----


@triton.jit
def topk_relu_backward_kernel(y_ptr, dy_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + i, mask=i < size, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < size, other=0.0)
    tl.store(dx_ptr + i, tl.where(y > 0, dy, 0.0).to(dx_ptr.dtype.element_ty), mask=i < size)


class TopkRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, K):
        y = topk_relu(x, K)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        topk_relu_backward_kernel[(triton.cdiv(y.numel(), 1024),)](
            y, dy.contiguous(), dx, y.numel(), BLOCK=1024
        )
        return dx, None


def topk_relu_autograd(x, K):
    return TopkRelu.apply(x, K)
