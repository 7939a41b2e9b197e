"""Contextual positions (CoPE): a key's distance is a sum of gates, its bias lies between two whole distances.

Forward    for query i and key j <= i:  g_j = sigmoid(s_ij),  p_j = min(sum_{l = j .. i} g_l, P - 1),
           f = floor p_j, w = p_j - f:   y_ij = s_ij + (1 - w) e_{i, f} + w e_{i, f + 1};  y = 0 for j > i.
           s are the scores, e_{i, 0 .. P - 1} the query's products with the P position vectors
Backward   de_ip = sum_j dy_ij ((1 - w_j) [f_j = p] + w_j [f_j + 1 = p]);
           dp_j = dy_ij (e_{i, f + 1} - e_{i, f}) where the minimum was the sum, else 0;
           gate l is in p_j for all j <= l, so dg_l = sum_{j <= l} dp_j and ds_il = dy_il + dg_l g_l (1 - g_l)

Forward schedule: a program owns a row of scores in one tile: gates, a cumulative sum from the right, and two
gathers from the row's P numbers.
Backward schedule: the same owner rebuilds gates and positions from s, so nothing but the inputs is saved. The
adjoint of a sum from the right is a sum from the left, in registers. Where dy goes in de is data, but there
are only P places and one row that fills them: for each the owner adds up, over its tile, what lies within 1
of it. That is P reductions in place of atomics, in a fixed order, and e is read from cache.

op: cope
schedule: reverse_scan, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def contextual(s, j, i, P):
    """Gates of the keys up to i, whole position, fraction, and whether the limit was not reached."""
    g = tl.where(j <= i, tl.sigmoid(s), 0.0)
    p = tl.cumsum(g, axis=0, reverse=True)
    free = p < P - 1
    p = tl.where(free, p, P - 1.0)
    f = tl.floor(p)
    return g, f.to(tl.int32), p - f, free


@triton.jit
def cope_kernel(s_ptr, e_ptr, y_ptr, Q, K, P, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = row % Q + K - Q  # the last query sees the last key
    j = tl.arange(0, BLOCK)
    mask = (j < K) & (j <= i)
    s = tl.load(s_ptr + row * K + j, mask=mask, other=0.0)
    _, f, w, _ = contextual(s, j, i, P)
    below = tl.load(e_ptr + row * P + f, mask=mask, other=0.0)
    above = tl.load(e_ptr + row * P + f + 1, mask=mask & (f + 1 < P), other=0.0)
    y = s + (1 - w) * below + w * above
    tl.store(y_ptr + row * K + j, tl.where(mask, y, 0.0), mask=j < K)


@autodiff(inputs_require_grad=(0, 1))
def cope(s, e):
    """s: (..., Q, K) float32, Q <= K <= 16384; e: (..., Q, P) float32."""
    (Q, K), P = s.shape[-2:], e.shape[-1]
    if s.shape[:-1] != e.shape[:-1] or not Q <= K <= 16384 or P < 1:
        raise ValueError(f"scores {tuple(s.shape)} and positions {tuple(e.shape)} do not fit")
    s, y = s.contiguous(), torch.empty(s.shape, device=s.device, dtype=s.dtype)
    grid = (s.shape[:-1].numel(),)
    cope_kernel[grid](s, e.contiguous(), y, Q, K, P, BLOCK=triton.next_power_of_2(K))
    return y


def reference(s, e):
    (Q, K), P = s.shape[-2:], e.shape[-1]
    seen = torch.ones(Q, K, device=s.device, dtype=torch.bool).tril(K - Q)
    g = torch.where(seen, torch.sigmoid(s), 0.0)
    p = g.flip(-1).cumsum(-1).flip(-1).clamp(max=P - 1)
    f = p.detach().floor()
    w = p - f
    below = e.gather(-1, f.long())
    above = e.gather(-1, (f.long() + 1).clamp(max=P - 1))
    return torch.where(seen, s + (1 - w) * below + w * above, 0.0)


SWEEP = [{"B": 4, "H": 8, "Q": 1024, "K": 1024, "P": 64}, {"B": 1, "H": 3, "Q": 1000, "K": 1999, "P": 40}]
SWEEP_CPU = [{"B": 1, "H": 2, "Q": 21, "K": 21, "P": 5}, {"B": 2, "H": 1, "Q": 6, "K": 17, "P": 8}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, Q, P = dims["B"], dims["H"], dims["Q"], dims["P"]
    s = torch.randn(B, H, Q, max(Q, dims["K"]), device=device, dtype=dtype)
    return s, torch.randn(B, H, Q, P, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def cope_backward_kernel(s_ptr, e_ptr, dy_ptr, ds_ptr, de_ptr, Q, K, P, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = row % Q + K - Q
    j = tl.arange(0, BLOCK)
    mask = (j < K) & (j <= i)
    s = tl.load(s_ptr + row * K + j, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * K + j, mask=mask, other=0.0)
    g, f, w, free = contextual(s, j, i, P)
    below = tl.load(e_ptr + row * P + f, mask=mask, other=0.0)
    above = tl.load(e_ptr + row * P + f + 1, mask=mask & (f + 1 < P), other=0.0)
    dp = tl.where(free, dy * (above - below), 0.0)
    ds = dy + tl.cumsum(dp, axis=0) * g * (1 - g)
    tl.store(ds_ptr + row * K + j, tl.where(mask, ds, 0.0), mask=j < K)
    for p in range(P):
        share = tl.where(f == p, 1 - w, 0.0) + tl.where(f + 1 == p, w, 0.0)
        tl.store(de_ptr + row * P + p, tl.sum(dy * share, axis=0))


class CoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, e):
        s, e = s.contiguous(), e.contiguous()
        ctx.save_for_backward(s, e)
        return cope(s, e)

    @staticmethod
    def backward(ctx, dy):
        s, e = ctx.saved_tensors
        (Q, K), P, needs = s.shape[-2:], e.shape[-1], ctx.needs_input_grad
        ds, de = torch.empty_like(s), torch.empty_like(e)
        grid = (s.shape[:-1].numel(),)
        cope_backward_kernel[grid](s, e, dy.contiguous(), ds, de, Q, K, P, BLOCK=triton.next_power_of_2(K))
        return ds if needs[0] else None, de if needs[1] else None


def cope_autograd(s, e):
    return CoPE.apply(s, e)
