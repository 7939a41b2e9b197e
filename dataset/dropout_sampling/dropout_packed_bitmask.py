"""Dropout that keeps its decisions, 32 of them in a word.

Forward    y_i = x_i m_i / (1 - p),  m_i = [u_i >= p],  u_i the i-th number of the Philox stream of a seed
Backward   dx_i = dy_i m_i / (1 - p)

Forward schedule: a program owns a block of elements as rows of 32. A row's decisions are shifted each to its
own bit and added up, which is a bitwise "or" as no two meet: one word a row.
Backward schedule: a word is read by the 32 lanes whose decisions it holds, and each shifts its own bit down.
A mask is an eighth of a byte an element beside the two or four of dy, so reading it is all but free, and ten
rounds of Philox an element are not: on narrow types a kernel that draws again computes longer than it reads.
It is also what remains where the numbers cannot be drawn again, as when the forward ran with a generator
that has moved on.

op: dropout
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


WORDS = 32  # words a program


@triton.jit
def places(n_elements, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    offs = word[:, None] * 32 + bit[None, :]
    return word, bit, offs, offs < n_elements


@triton.jit
def dropout_kernel(x_ptr, y_ptr, words_ptr, n_elements, p, seed, WORDS: tl.constexpr):
    word, bit, offs, mask = places(n_elements, WORDS)
    keep = tl.rand(seed, offs) >= p
    tl.store(words_ptr + word, tl.sum(keep.to(tl.int32) << bit[None, :], axis=1), mask=word * 32 < n_elements)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0.0).to(y_ptr.dtype.element_ty), mask=mask)


def dropout_forward(x, p, seed):
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    n = x.numel()
    y = torch.empty_like(x)
    words = torch.empty(triton.cdiv(n, 32), device=x.device, dtype=torch.int32)
    dropout_kernel[(triton.cdiv(n, 32 * WORDS),)](x, y, words, n, p, seed, WORDS=WORDS)
    return y, words


@autodiff(inputs_require_grad=(0,))
def packed_dropout(x, p, seed):
    return dropout_forward(x.contiguous(), p, seed)[0]


def reference(x, p, seed):
    ones = torch.ones(x.shape, device=x.device)
    keep = dropout_forward(ones, p, seed)[0] != 0
    return torch.where(keep, x / (1 - p), 0.0)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 5003, "N": 1601}]
SWEEP_CPU = [{"M": 33, "N": 31}, {"M": 5, "N": 400}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return (x,), {"p": 0.2, "seed": 611}


# ---- backward ----


@triton.jit
def dropout_backward_kernel(dy_ptr, dx_ptr, words_ptr, n_elements, p, WORDS: tl.constexpr):
    word, bit, offs, mask = places(n_elements, WORDS)
    words = tl.load(words_ptr + word, mask=word * 32 < n_elements, other=0)
    keep = ((words[:, None] >> bit[None, :]) & 1) != 0
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offs, tl.where(keep, dy / (1 - p), 0.0).to(dx_ptr.dtype.element_ty), mask=mask)


class PackedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        y, words = dropout_forward(x.contiguous(), p, seed)
        ctx.save_for_backward(words)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx, dy):
        (words,) = ctx.saved_tensors
        dy = dy.contiguous()
        n, dx = dy.numel(), torch.empty_like(dy)
        grid = (triton.cdiv(n, 32 * WORDS),)
        dropout_backward_kernel[grid](dy, dx, words, n, ctx.p, WORDS=WORDS)
        return dx, None, None


def packed_dropout_autograd(x, p, seed):
    return PackedDropout.apply(x, p, seed)
