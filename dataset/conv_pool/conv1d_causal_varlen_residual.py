"""Causal depthwise convolution of packed sequences, added to its input: no tap reads another sequence.

Forward    y_t = x_t + sum_{k < K} w_k x_{t - k} over the k with seq_{t - k} = seq_t, per channel
Backward   dx_s = dy_s + sum_k w_k dy_{s + k} over the k with seq_{s + k} = seq_s;
           dw_k = sum over the t with seq_{t - k} = seq_t of dy_t x_{t - k}

Forward schedule: a program owns (tile of times, tile of channels) of the packed batch. Sequences are told
apart by their number at each time, so a tile may hold parts of several, short ones too, and no sequence
leaves a tile half empty.
Backward schedule: dx is the forward with the taps looking ahead, by the same owner: whether two times belong
together does not depend on who asks. That owner has x, dy and the masks of its tile, so it also makes its
tile's share of dw: dy_t is its own, x_{t - k} one more read from cache. A tap's share is one row, which it
adds by an atomic to an fp32 buffer of K rows; tiles meet there only once each, against K reads of the tile.

op: causal_conv1d_varlen
schedule: gather_transpose, atomic_accumulate
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 64, "BLOCK_C": 64}


@triton.jit
def load_rows(ptr, t, inside, c, C):
    mask = inside[:, None] & (c[None, :] < C)
    return tl.load(ptr + t[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def together(seq_ptr, seq, t, other, T):
    """Which of the times `other` are in the sequences of the times t."""
    exists = (t < T) & (other >= 0) & (other < T)
    return exists & (tl.load(seq_ptr + other, mask=exists, other=0) == seq)


@triton.jit
def varlen_conv_kernel(x_ptr, w_ptr, seq_ptr, y_ptr, T, C, K, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    seq = tl.load(seq_ptr + t, mask=t < T, other=0)
    y = load_rows(x_ptr, t, t < T, c, C)
    for k in range(K):
        w = tl.load(w_ptr + k * C + c, mask=c < C, other=0.0).to(tl.float32)
        y += w[None, :] * load_rows(x_ptr, t - k, together(seq_ptr, seq, t, t - k, T), c, C)
    mask = (t[:, None] < T) & (c[None, :] < C)
    tl.store(y_ptr + t[:, None] * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def varlen_conv(x, w, seq):
    """x: (T, C), sequences one after the other; w: (K, C), tap k reads k steps back; seq: int32 (T), the
    number of each time's sequence."""
    (T, C), K = x.shape, w.shape[0]
    y = torch.empty((T, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(C, TILE["BLOCK_C"]))
    varlen_conv_kernel[grid](x.contiguous(), w.contiguous(), seq.contiguous(), y, T, C, K, **TILE)
    return y


def reference(x, w, seq):
    y = x
    for k in range(min(w.shape[0], x.shape[0])):
        n = x.shape[0] - k
        same = (seq[k:] == seq[:n])[:, None]
        y = y + torch.cat([torch.zeros_like(x[:k]), torch.where(same, w[k] * x[:n], 0.0)])
    return y


SWEEP = [{"T": 65536, "B": 96, "C": 1024, "K": 4}, {"T": 30011, "B": 500, "C": 700, "K": 7}]
SWEEP_CPU = [{"T": 35, "B": 4, "C": 18, "K": 3}, {"T": 150, "B": 9, "C": 70, "K": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, C, K = dims["T"], dims["C"], dims["K"]
    seq = torch.randint(0, dims["B"], (T,), device=device, dtype=torch.int32).sort().values
    x = torch.randn(T, C, device=device, dtype=dtype)
    return x, torch.randn(K, C, device=device, dtype=dtype) / max(1, K) ** 0.5, seq


# ---- backward ----


@triton.jit
def varlen_conv_backward_kernel(
    x_ptr, w_ptr, seq_ptr, dy_ptr, dx_ptr, dw_ptr, T, C, K,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    seq = tl.load(seq_ptr + t, mask=t < T, other=0)
    dy = load_rows(dy_ptr, t, t < T, c, C)
    dx = dy
    for k in range(K):
        w = tl.load(w_ptr + k * C + c, mask=c < C, other=0.0).to(tl.float32)
        dx += w[None, :] * load_rows(dy_ptr, t + k, together(seq_ptr, seq, t, t + k, T), c, C)
        behind = load_rows(x_ptr, t - k, together(seq_ptr, seq, t, t - k, T), c, C)
        tl.atomic_add(dw_ptr + k * C + c, tl.sum(dy * behind, axis=0), mask=c < C, sem="relaxed")
    mask = (t[:, None] < T) & (c[None, :] < C)
    tl.store(dx_ptr + t[:, None] * C + c[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class VarlenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, seq):
        x, w, seq = x.contiguous(), w.contiguous(), seq.contiguous()
        ctx.save_for_backward(x, w, seq)
        return varlen_conv(x, w, seq)

    @staticmethod
    def backward(ctx, dy):
        x, w, seq = ctx.saved_tensors
        (T, C), K, needs = x.shape, w.shape[0], ctx.needs_input_grad
        dx = torch.empty_like(x)
        dw = torch.zeros(w.shape, device=w.device, dtype=torch.float32)
        grid = (triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(C, TILE["BLOCK_C"]))
        varlen_conv_backward_kernel[grid](x, w, seq, dy.contiguous(), dx, dw, T, C, K, **TILE)
        return dx if needs[0] else None, dw.to(w.dtype) if needs[1] else None, None


def varlen_conv_autograd(x, w, seq):
    return VarlenConv.apply(x, w, seq)
