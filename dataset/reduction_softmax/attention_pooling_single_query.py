"""Attention pooling: a sequence becomes one vector, its tokens weighted by a softmax of a learned score.

Forward    s_t = <x_t, w>,   p = softmax of s over the tokens of a sequence,   y = sum_t p_t x_t
Backward   with c_t = x_t - y:   ds_t = p_t (<dy, x_t> - <dy, y>) = p_t <dy, c_t>,   dx_t = p_t dy + ds_t w,
           dw = sum over sequences and t of ds_t x_t = the same of ds_t c_t, as a sequence's ds_t sum to 0

Forward schedule: a program owns a sequence and reads its tokens once, several at a time: their scores, an
online softmax, and the running sum y, which is rescaled as the maximum rises. x is by far the largest thing
here, and is in registers for both the score and the sum. y, in float32, and l = log sum exp(s) are kept,
D + 1 numbers a sequence.
Backward schedule: the row sum of softmax's backward, in the usual form one over tokens, is <dy, y>, known
before any token is read. Each token is then alone: its row x_t in registers gives s_t and p_t, less y its
ds_t, and dx_t is written at once. So tokens need no owner of the whole sequence, and a program takes a tile
of tokens of one sequence, many for a long one. It adds ds_t c_t over its tokens and stores the sum in its
slot; dw, common to all sequences, is the sum of the slots. Where one token has nearly all of p, it is nearly
y: its ds_t is mere rounding, which x_t would carry into dw, while c_t, nearly 0 as well, does not.

op: attention_pooling
schedule: recompute_from_stats, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(D):
    """Tokens of a tile, all D numbers of each."""
    BLOCK_D = triton.next_power_of_2(D)
    return {"BLOCK_T": max(1, min(32, 4096 // BLOCK_D)), "BLOCK_D": BLOCK_D}


@triton.jit
def load_tokens(x_ptr, sequence, t, d, T, D):
    mask = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(x_ptr + (sequence * T + t[:, None]) * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def pooling_kernel(
    x_ptr, w_ptr, y_ptr, exact_ptr, lse_ptr, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    sequence, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    largest, total = -float("inf"), 0.0
    y = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        x = load_tokens(x_ptr, sequence, t, d, T, D)
        s = tl.where(t < T, tl.sum(x * w[None, :], axis=1), -float("inf"))
        larger = tl.maximum(largest, tl.max(s, axis=0))
        rescale = tl.exp(largest - larger)
        e = tl.exp(s - larger)
        total = total * rescale + tl.sum(e, axis=0)
        y = y * rescale + tl.sum(e[:, None] * x, axis=0)
        largest = larger
    tl.store(lse_ptr + sequence, largest + tl.log(total))
    y /= total
    tl.store(y_ptr + sequence * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(exact_ptr + sequence * D + d, y, mask=d < D)


def pooling_forward(x, w):
    B, T, D = x.shape
    if w.shape != (D,) or T == 0 or D > 4096:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)}: some tokens, rows of at most 4096")
    y = torch.empty((B, D), device=x.device, dtype=x.dtype)
    exact = torch.empty_like(y, dtype=torch.float32)
    lse = torch.empty(B, device=x.device, dtype=torch.float32)
    pooling_kernel[(B,)](x, w, y, exact, lse, T, D, **tiling(D))
    return y, exact, lse


@autodiff(inputs_require_grad=(0, 1))
def attention_pooling(x, w):
    """x: (B, T, D); w: (D); gives (B, D)."""
    return pooling_forward(x.contiguous(), w.contiguous())[0]


def reference(x, w):
    return (torch.softmax(x @ w, dim=1)[..., None] * x).sum(1)


SWEEP = [{"B": 128, "T": 512, "D": 1024}, {"B": 67, "T": 1001, "D": 700}]
SWEEP_CPU = [{"B": 3, "T": 41, "D": 20}, {"B": 2, "T": 70, "D": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["D"], device=device, dtype=dtype) / max(1, dims["D"]) ** 0.5


# ---- backward ----

TOKENS = 128  # of one program


@triton.jit
def pooling_backward_kernel(
    x_ptr, w_ptr, y_ptr, lse_ptr, dy_ptr, dx_ptr, slots_ptr, T, D,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + sequence * D + d, mask=d < D, other=0.0)
    dy = tl.load(dy_ptr + sequence * D + d, mask=d < D, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + sequence)
    dw = tl.zeros([BLOCK_D], dtype=tl.float32)
    first = tl.program_id(0) * TOKENS
    for start in range(first, tl.minimum(first + TOKENS, T), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        x = load_tokens(x_ptr, sequence, t, d, T, D)
        s = tl.where(t < T, tl.sum(x * w[None, :], axis=1), -float("inf"))
        p = tl.exp(s - lse)
        c = x - y[None, :]
        ds = p * tl.sum(c * dy[None, :], axis=1)
        dx = p[:, None] * dy[None, :] + ds[:, None] * w[None, :]
        offs = (sequence * T + t[:, None]) * D + d[None, :]
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=(t[:, None] < T) & (d[None, :] < D))
        dw += tl.sum(ds[:, None] * c, axis=0)
    tl.store(slots_ptr + (sequence * tl.num_programs(0) + tl.program_id(0)) * D + d, dw, mask=d < D)


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, slots, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        mask = (slot[:, None] < slots) & (d[None, :] < D)
        dw += tl.load(slots_ptr + slot[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + d, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=d < D)


class AttentionPooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        y, exact, lse = pooling_forward(x, w)
        ctx.save_for_backward(x, w, exact, lse)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, y, lse = ctx.saved_tensors
        (B, T, D), needs = x.shape, ctx.needs_input_grad
        parts = triton.cdiv(T, TOKENS)
        dx, slots = torch.empty_like(x), torch.empty((B, parts, D), device=x.device, dtype=torch.float32)
        pooling_backward_kernel[(parts, B)](
            x, w, y, lse, dy.contiguous(), dx, slots, T, D, TOKENS=TOKENS, **tiling(D)
        )
        dw = None
        if needs[1]:
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(D, 32),)](slots, dw, B * parts, D, BLOCK_S=64, BLOCK_D=32)
        return dx if needs[0] else None, dw


def attention_pooling_autograd(x, w):
    return AttentionPooling.apply(x, w)
