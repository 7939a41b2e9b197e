"""Softmax of rows with dropout of its probabilities, as in an attention that is not fused further.

Forward    P = softmax(x),   y_j = P_j m_j / (1 - p),  m_j = [u_j >= p],  u the Philox stream of a seed
Backward   dP_j = dy_j m_j / (1 - p);  dx_j = P_j (dP_j - sum_k P_k dP_k)

Forward schedule: a program owns a row in one tile, normalises it and drops; P is stored beside y only when a
backward will want it.
Backward schedule: y alone would not do, for where the mask is 0 it has forgotten P, and such entries do have
a gradient: through the sum in the denominator, -P_j <P, dP>. So P is saved, and the mask, which costs
nothing to store in a seed, is drawn again. The same owner then makes dP, one dot over the row, and the
correction: P and dy are read once and dx is written once.

op: softmax_dropout
schedule: row_reduce_correct, index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def drop(value, seed, offs, p):
    return tl.where(tl.rand(seed, offs) >= p, value / (1 - p), 0.0)


@triton.jit
def softmax_dropout_kernel(
    x_ptr, y_ptr, P_ptr, N, p, seed, SAVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * N + cols
    x = tl.load(x_ptr + offs, mask=cols < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    P = e / tl.sum(e, axis=0)
    tl.store(y_ptr + offs, drop(P, seed, offs, p).to(y_ptr.dtype.element_ty), mask=cols < N)
    if SAVE:
        tl.store(P_ptr + offs, P.to(P_ptr.dtype.element_ty), mask=cols < N)


def softmax_dropout_forward(x, p, seed, save):
    N = x.shape[-1]
    if N > 32768 or not 0 <= p < 1:
        raise ValueError(f"rows of {N} do not fit one tile, or p = {p} is no probability below 1")
    y, P = torch.empty_like(x), torch.empty_like(x) if save else None
    BLOCK = triton.next_power_of_2(N)
    softmax_dropout_kernel[(x.numel() // max(1, N),)](x, y, P, N, p, seed, SAVE=save, BLOCK=BLOCK)
    return y, P


@autodiff(inputs_require_grad=(0,))
def softmax_dropout(x, p, seed):
    """x: (..., N)."""
    return softmax_dropout_forward(x.contiguous(), p, seed, False)[0]


def reference(x, p, seed):
    keep = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    keep_kernel[(x.numel() // max(1, x.shape[-1]),)](
        keep, x.shape[-1], p, seed, BLOCK=triton.next_power_of_2(x.shape[-1])
    )
    return torch.softmax(x, dim=-1) * keep / (1 - p)


@triton.jit
def keep_kernel(keep_ptr, N, p, seed, BLOCK: tl.constexpr):
    """The mask alone, for the reference."""
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * N + cols
    tl.store(keep_ptr + offs, (drop(1.0 + 0 * cols, seed, offs, p) > 0).to(tl.int8), mask=cols < N)


SWEEP = [{"M": 32768, "N": 1024}, {"M": 4099, "N": 3001}]
SWEEP_CPU = [{"M": 23, "N": 61}, {"M": 40, "N": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),), {"p": 0.1, "seed": 20}


# ---- backward ----


@triton.jit
def softmax_dropout_backward_kernel(P_ptr, dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * N + cols
    P = tl.load(P_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    dP = drop(tl.load(dy_ptr + offs, mask=cols < N, other=0.0).to(tl.float32), seed, offs, p)
    dx = P * (dP - tl.sum(P * dP, axis=0))
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        y, P = softmax_dropout_forward(x.contiguous(), p, seed, True)
        ctx.save_for_backward(P)
        ctx.p, ctx.seed = p, seed
        return y

    @staticmethod
    def backward(ctx, dy):
        (P,) = ctx.saved_tensors
        N, dx = P.shape[-1], torch.empty_like(P)
        softmax_dropout_backward_kernel[(P.numel() // max(1, N),)](
            P, dy.contiguous(), dx, N, ctx.p, ctx.seed, BLOCK=triton.next_power_of_2(N)
        )
        return dx, None, None


def softmax_dropout_autograd(x, p, seed):
    return SoftmaxDropout.apply(x, p, seed)
