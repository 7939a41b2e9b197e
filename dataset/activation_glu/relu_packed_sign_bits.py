"""ReLU that keeps one bit an element for its backward.

Forward    y = max(x, 0) = x m,  m = [x > 0]
Backward   dx = dy m

Forward schedule: flat tiles. As the tile is in registers, its 32 W signs are summed to W words, bit i of a
word being element 32 w + i: a product with powers of two and a sum along an axis of 32.
Backward schedule: a ReLU's gradient needs x only for its sign, yet the activation that is kept until the
backward is as large as x. Where neither x nor y is needed by anybody else, the words are all that stays, 1/32
of a float32 and 1/16 of a bf16. A program reads W words, spreads each to 32 lanes by shifts, and selects.
Memory traffic falls as well: the backward is one read and one write instead of two reads.

op: relu
schedule: same_tile_pointwise, index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


WORDS = 64  # of a program


@triton.jit
def element_numbers(WORDS: tl.constexpr):
    """Places of the elements of a program's words, (words, 32)."""
    words = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return words, words[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def relu_kernel(x_ptr, y_ptr, bits_ptr, n_elements, WORDS: tl.constexpr):
    words, offs = element_numbers(WORDS)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0)
    keep = x.to(tl.float32) > 0
    tl.store(y_ptr + offs, tl.where(keep, x, 0.0).to(y_ptr.dtype.element_ty), mask=offs < n_elements)
    bits = tl.sum(keep.to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)  # no two set the same bit
    tl.store(bits_ptr + words, bits, mask=words * 32 < n_elements)


def relu_forward(x):
    y, words = torch.empty_like(x), triton.cdiv(x.numel(), 32)
    bits = torch.empty(words, device=x.device, dtype=torch.int32)
    relu_kernel[(triton.cdiv(words, WORDS),)](x, y, bits, x.numel(), WORDS=WORDS)
    return y, bits


@autodiff(inputs_require_grad=(0,))
def relu(x):
    """x: any shape."""
    return relu_forward(x.contiguous())[0]


def reference(x):
    return torch.where(x > 0, x, 0.0)


SWEEP = [{"N": 1 << 27}, {"N": 50000017}]
SWEEP_CPU = [{"N": 1100}, {"N": 4129}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def relu_backward_kernel(bits_ptr, dy_ptr, dx_ptr, n_elements, WORDS: tl.constexpr):
    words, offs = element_numbers(WORDS)
    bits = tl.load(bits_ptr + words, mask=words * 32 < n_elements, other=0)
    keep = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
    dy = tl.load(dy_ptr + offs, mask=offs < n_elements, other=0.0)
    dx = tl.where(keep != 0, dy, 0.0).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + offs, dx, mask=offs < n_elements)


class ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, bits = relu_forward(x.contiguous())
        ctx.save_for_backward(bits)
        return y

    @staticmethod
    def backward(ctx, dy):
        (bits,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        relu_backward_kernel[(triton.cdiv(bits.numel(), WORDS),)](bits, dy, dx, dy.numel(), WORDS=WORDS)
        return dx


def relu_autograd(x):
    return ReLU.apply(x)
