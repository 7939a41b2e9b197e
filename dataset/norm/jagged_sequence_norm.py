"""Norm over whole sequences of different lengths: one mean and variance for all tokens and channels of each.

Forward    over the n_s D numbers of sequence s:   mu = mean x,  rstd = (mean (x - mu)^2 + eps)^(-1/2),
           y = (x - mu) rstd
Backward   dx = rstd (dy - mean dy - y mean(dy y)),   the means over the same numbers

Forward schedule: sequences lie one after another, so the numbers of one are a single range of memory,
whatever the number of its tokens and channels. A program owns a sequence and walks its range as a flat list:
mean and squares by merging tiles (Chan's rule) in one walk, y in another.
Backward schedule: the same owner, two walks of the same range. y is the normalised x, so it is all that the
backward reads beside dy: neither x nor mu is kept. The two sums stay in registers between the walks, no
partials and no search of a token's sequence; an empty sequence walks nothing. A batch has hundreds of
sequences, which fill a GPU; the longest is what a step waits for, so a few very long ones would be cut in
chunks.

op: jagged_layer_norm
schedule: row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def jagged_norm_kernel(x_ptr, offsets_ptr, y_ptr, rstd_ptr, D, eps, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    first = tl.load(offsets_ptr + sequence) * D
    end = tl.load(offsets_ptr + sequence + 1) * D
    mu = 0.0
    squares = 0.0
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        seen = (start - first).to(tl.float32)
        count = tl.minimum(BLOCK, end - start).to(tl.float32)
        tile_mu = tl.sum(x, axis=0) / count
        centred = tl.where(i < end, x - tile_mu, 0.0)
        step, share = tile_mu - mu, count / (seen + count)
        squares += tl.sum(centred * centred, axis=0) + step * step * (seen * share)
        mu += step * share
    size = tl.maximum(end - first, 1).to(tl.float32)
    rstd = tl.rsqrt(squares / size + eps)
    tl.store(rstd_ptr + sequence, rstd)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, ((x - mu) * rstd).to(y_ptr.dtype.element_ty), mask=i < end)


def jagged_norm_forward(x, offsets, eps):
    y, sequences = torch.empty_like(x), offsets.numel() - 1
    rstd = torch.empty(sequences, device=x.device, dtype=torch.float32)
    jagged_norm_kernel[(sequences,)](x, offsets, y, rstd, x.shape[1], eps, BLOCK=BLOCK)
    return y, rstd


@autodiff(inputs_require_grad=(0,))
def jagged_sequence_norm(x, offsets, eps=1e-5):
    """x: (tokens, D); offsets: int64 (sequences + 1), from 0 to tokens."""
    return jagged_norm_forward(x.contiguous(), offsets.contiguous(), eps)[0]


def reference(x, offsets, eps=1e-5):
    parts = []
    for part in x.split(offsets.diff().tolist()):
        centred = part - part.sum() / max(1, part.numel())
        parts.append(centred * torch.rsqrt(centred.pow(2).sum() / max(1, part.numel()) + eps))
    return torch.cat(parts)


SWEEP = [{"B": 512, "T": 400, "D": 256}, {"B": 200, "T": 101, "D": 500}]
SWEEP_CPU = [{"B": 4, "T": 11, "D": 20}, {"B": 3, "T": 150, "D": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.randint(0, 2 * dims["T"] + 1, (dims["B"],), device=device)  # T tokens on average
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    x = 0.5 + 2 * torch.randn(int(offsets[-1]), dims["D"], device=device, dtype=dtype)
    return x, offsets


# ---- backward ----


@triton.jit
def jagged_norm_backward_kernel(y_ptr, offsets_ptr, rstd_ptr, dy_ptr, dx_ptr, D, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    first = tl.load(offsets_ptr + sequence) * D
    end = tl.load(offsets_ptr + sequence + 1) * D
    sum_dy = tl.zeros([BLOCK], dtype=tl.float32)
    sum_dyy = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        sum_dy += dy
        sum_dyy += dy * tl.load(y_ptr + i, mask=i < end, other=0.0).to(tl.float32)
    size = tl.maximum(end - first, 1).to(tl.float32)
    c0 = tl.sum(sum_dy, axis=0) / size
    c1 = tl.sum(sum_dyy, axis=0) / size
    rstd = tl.load(rstd_ptr + sequence)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        tl.store(dx_ptr + i, (rstd * (dy - c0 - y * c1)).to(dx_ptr.dtype.element_ty), mask=i < end)


class JaggedSequenceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, eps):
        offsets = offsets.contiguous()
        y, rstd = jagged_norm_forward(x.contiguous(), offsets, eps)
        ctx.save_for_backward(y, offsets, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, offsets, rstd = ctx.saved_tensors
        dx = torch.empty_like(y)
        jagged_norm_backward_kernel[(rstd.numel(),)](
            y, offsets, rstd, dy.contiguous(), dx, y.shape[1], BLOCK=BLOCK
        )
        return dx, None, None


def jagged_sequence_norm_autograd(x, offsets, eps=1e-5):
    return JaggedSequenceNorm.apply(x, offsets, eps)
