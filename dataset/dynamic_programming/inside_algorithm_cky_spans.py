"""Log-partition over all binary trees of a sentence, from scores of spans (the inside algorithm).

Forward    I_i,i+1 = s_i,i+1,   I_ij = s_ij + log sum_{i < k < j} e^{I_ik + I_kj},   z = I_0n
Backward   G_ij = dz/dI_ij is the posterior of a span; s_ij enters I_ij with weight one, so ds_ij = dz G_ij.
           G_0n = 1. A span is the left part of (i, m), m > j, or the right part of (h, j), h < i. With m_ij
           the largest of a span's splits and t_ij = sum_k e^{I_ik + I_kj - m_ij}:
           G_ij = sum_m G_im e^{I_ij + I_jm - m_im} / t_im + sum_h G_hj e^{I_hi + I_ij - m_hj} / t_hj

Forward schedule: spans of one length need only shorter ones, so one launch a length, over all sentences and
starts; a program owns a few spans and walks their splits, with m and t online; they are stored beside I.
Backward schedule: the lengths fall instead. A split passes gradient to two parts, and pushed there it would
need atomics, as a span is part of many. Pulled, it needs none: a span gathers from the longer spans that it
begins or ends, whose G is final, and is stored once. The split weights are rebuilt from I, m and t; no n^3
numbers are kept. m and t apart, not their logarithm: that would be rounded as I is, and the weights of a span
not add up to one.

op: inside_cky
schedule: reverse_scan, gather_transpose
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def inside_kernel(s_ptr, inside_ptr, m_ptr, t_ptr, n, length, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    side = n + 1  # spans lie in squares of n + 1 fence posts
    chart = tl.program_id(1).to(tl.int64) * side * side
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = i + length
    there = j <= n
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(1, length, BLOCK_K):
        step = start + tl.arange(0, BLOCK_K)
        mask = there[:, None] & (step[None, :] < length)
        k = i[:, None] + step[None, :]
        left = tl.load(inside_ptr + chart + i[:, None] * side + k, mask=mask, other=-1e30)
        right = tl.load(inside_ptr + chart + k * side + j[:, None], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(left + right, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(left + right - m_new[:, None]), axis=1)
        m = m_new
    s = tl.load(s_ptr + chart + i * side + j, mask=there, other=0.0)
    v = tl.where(length > 1, m + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(inside_ptr + chart + i * side + j, s + v, mask=there)
    tl.store(m_ptr + chart + i * side + j, m, mask=there)
    tl.store(t_ptr + chart + i * side + j, total, mask=there)


@triton.jit
def root_kernel(inside_ptr, z_ptr, B, n, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(inside_ptr + b.to(tl.int64) * (n + 1) * (n + 1) + n, mask=b < B, other=0.0)
    tl.store(z_ptr + b, z, mask=b < B)


def inside_forward(s):
    B, side = s.shape[:2]
    n = side - 1
    if s.shape[2] != side or n < 1:
        raise ValueError("need s (B, n + 1, n + 1), of one word or more")
    inside, m, t = torch.empty_like(s), torch.empty_like(s), torch.empty_like(s)
    z = torch.empty(B, device=s.device, dtype=torch.float32)
    for length in range(1, n + 1):
        grid = (triton.cdiv(n + 1 - length, 32), B)
        inside_kernel[grid](s, inside, m, t, n, length, BLOCK=32, BLOCK_K=32)
    root_kernel[(triton.cdiv(B, 128),)](inside, z, B, n, BLOCK=128)
    return z, inside, m, t


@autodiff(inputs_require_grad=(0,))
def inside_cky(s):
    """s: (B, n + 1, n + 1), float32, the score of the span from fence post i to j > i; gives (B)."""
    return inside_forward(s.contiguous())[0]


def reference(s):
    n = s.shape[1] - 1
    inside = {1: s.diagonal(1, 1, 2)}  # by length, all starts at once
    for length in range(2, n + 1):
        starts = n + 1 - length
        splits = [inside[k][:, :starts] + inside[length - k][:, k : k + starts] for k in range(1, length)]
        inside[length] = s.diagonal(length, 1, 2) + torch.stack(splits).logsumexp(0)
    return inside[n][:, 0]


SWEEP = [{"B": 128, "n": 64}, {"B": 31, "n": 101}]
SWEEP_CPU = [{"B": 1, "n": 7}, {"B": 2, "n": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    side = dims["n"] + 1
    return (torch.randn(dims["B"], side, side, device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def shared(own, sibling, parent, inside_ptr, m_ptr, t_ptr, ds_ptr, mask):
    """What spans at `parent` give to one whose inside is `own`, through the split with those at `sibling`."""
    inside = tl.load(inside_ptr + sibling, mask=mask, other=-1e30)
    m = tl.load(m_ptr + parent, mask=mask, other=0.0)
    g = tl.load(ds_ptr + parent, mask=mask, other=0.0) / tl.load(t_ptr + parent, mask=mask, other=1.0)
    return tl.sum(g * tl.exp(own[:, None] + inside - m), axis=1)


@triton.jit
def outside_kernel(
    inside_ptr, m_ptr, t_ptr, dz_ptr, ds_ptr, n, length, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    side = n + 1
    chart = tl.program_id(1).to(tl.int64) * side * side
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = i + length
    there = j <= n
    own = tl.load(inside_ptr + chart + i * side + j, mask=there, other=-1e30)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(1, n + 1 - length, BLOCK_K):
        step = start + tl.arange(0, BLOCK_K)[None, :]
        after, before = j[:, None] + step, i[:, None] - step
        sibling, parent = chart + j[:, None] * side + after, chart + i[:, None] * side + after
        mask = there[:, None] & (after <= n)
        ds += shared(own, sibling, parent, inside_ptr, m_ptr, t_ptr, ds_ptr, mask)
        sibling, parent = chart + before * side + i[:, None], chart + before * side + j[:, None]
        mask = there[:, None] & (before >= 0)
        ds += shared(own, sibling, parent, inside_ptr, m_ptr, t_ptr, ds_ptr, mask)
    ds = tl.where(length == n, tl.load(dz_ptr + tl.program_id(1)), ds)
    tl.store(ds_ptr + chart + i * side + j, ds, mask=there)


class InsideCKY(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s):
        s = s.contiguous()
        z, *charts = inside_forward(s)
        ctx.save_for_backward(*charts)
        return z

    @staticmethod
    def backward(ctx, dz):
        inside, m, t = ctx.saved_tensors
        B, n, dz = inside.shape[0], inside.shape[1] - 1, dz.contiguous()
        ds = torch.zeros_like(inside)  # what is no span stays 0
        for length in range(n, 0, -1):
            grid = (triton.cdiv(n + 1 - length, 32), B)
            outside_kernel[grid](inside, m, t, dz, ds, n, length, BLOCK=32, BLOCK_K=32)
        return ds


def inside_cky_autograd(s):
    return InsideCKY.apply(s)
