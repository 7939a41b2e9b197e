"""Weights that learn whether to be rounded up or down (adaptive rounding), with learned scales.

Forward    h = clamp(1.2 sigma(v) - 0.1, 0, 1),   q = clamp(b + h, lo, hi),   W = s_n q;
           b = floor of the original weights in units of s, fixed; v decides what is added to it
Backward   dv = s_n dW [lo < b + h < hi] [0 < h < 1] 1.2 sigma(v) (1 - sigma(v)),   ds_n = sum_k dW_nk q_nk

Forward schedule: a program owns a row of W, of one scale, and walks it in tiles.
Backward schedule: rounding itself has no gradient, and nothing straight through is needed either, since h is
a smooth path between the two neighbours: at its ends, where the clamp holds it, a weight has decided and
costs nothing. The owner of a row makes dv, and q again for ds, which is complete with its last tile: one
launch, no partials, no atomics. Only b and v are saved; b is one byte.

op: adaround
schedule: row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def soft_rounded(b_ptr, v_ptr, offs, mask, lo, hi):
    """q; sigma(v); whether v still moves q."""
    b = tl.load(b_ptr + offs, mask=mask, other=0).to(tl.float32)
    sigma = tl.sigmoid(tl.load(v_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    h = 1.2 * sigma - 0.1
    open_ = (h > 0) & (h < 1)
    h = tl.where(h > 0, tl.where(h < 1, h, 1.0), 0.0)
    q = b + h
    open_ = open_ & (q > lo) & (q < hi)
    return tl.where(q > lo, tl.where(q < hi, q, hi), lo), sigma, open_


@triton.jit
def adaround_kernel(b_ptr, v_ptr, s_ptr, w_ptr, K, lo, hi, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(s_ptr + row).to(tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        q, _, _ = soft_rounded(b_ptr, v_ptr, row * K + k, k < K, lo, hi)
        tl.store(w_ptr + row * K + k, (s * q).to(w_ptr.dtype.element_ty), mask=k < K)


@autodiff(inputs_require_grad=(1, 2))
def adaround(b, v, s, lo=-8, hi=7):
    """b: int8 (N, K), floors; v: (N, K); s: (N), scales; gives the weights (N, K)."""
    if b.shape != v.shape or s.shape != v.shape[:1] or b.dtype != torch.int8:
        raise ValueError("need b int8 (N, K), v (N, K), s (N)")
    b, v, s = b.contiguous(), v.contiguous(), s.contiguous()
    w, (N, K) = torch.empty_like(v), v.shape
    adaround_kernel[(N,)](b, v, s, w, K, float(lo), float(hi), BLOCK=1024)
    return w


def reference(b, v, s, lo=-8, hi=7):
    h = (1.2 * torch.sigmoid(v) - 0.1).clamp(0, 1)
    return (b + h).clamp(lo, hi) * s[:, None]


SWEEP = [{"N": 8192, "K": 8192}, {"N": 5003, "K": 3001}]
SWEEP_CPU = [{"N": 29, "K": 60}, {"N": 3, "K": 1100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, K = dims["N"], dims["K"]
    b = torch.randint(-9, 8, (N, K), device=device, dtype=torch.int8)
    v = 2 * torch.randn(N, K, device=device, dtype=dtype)
    return b, v, 0.5 + torch.rand(N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def adaround_backward_kernel(b_ptr, v_ptr, s_ptr, dw_ptr, dv_ptr, ds_ptr, K, lo, hi, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(s_ptr + row).to(tl.float32)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        q, sigma, moves = soft_rounded(b_ptr, v_ptr, row * K + k, k < K, lo, hi)
        dw = tl.load(dw_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        ds += dw * q
        dv = tl.where(moves, s * dw * 1.2 * sigma * (1 - sigma), 0.0)
        tl.store(dv_ptr + row * K + k, dv.to(dv_ptr.dtype.element_ty), mask=k < K)
    tl.store(ds_ptr + row, tl.sum(ds, axis=0).to(ds_ptr.dtype.element_ty))


class AdaRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, b, v, s, lo, hi):
        b, v, s = b.contiguous(), v.contiguous(), s.contiguous()
        ctx.save_for_backward(b, v, s)
        ctx.limits = float(lo), float(hi)
        return adaround(b, v, s, lo, hi)

    @staticmethod
    def backward(ctx, dw):
        b, v, s = ctx.saved_tensors
        N, K = v.shape
        dv, ds = torch.empty_like(v), torch.empty_like(s)
        adaround_backward_kernel[(N,)](b, v, s, dw.contiguous(), dv, ds, K, *ctx.limits, BLOCK=1024)
        needs = ctx.needs_input_grad
        return None, dv if needs[1] else None, ds if needs[2] else None, None, None


def adaround_autograd(b, v, s, lo=-8, hi=7):
    return AdaRound.apply(b, v, s, lo, hi)
