"""Dynamic convolution: every position and head has a causal filter of its own, normalised by a softmax.

Forward    p_tk = softmax over the K taps of w_t,  y_tc = sum_k p_tk x_{t-k, c}  for the channels c of the
           head, with x = 0 before the start
Backward   dp_tk = sum_c dy_tc x_{t-k, c},  dw_tk = p_tk (dp_tk - sum_l p_tl dp_tl);
           dx_sc = sum_k p_{s+k, k} dy_{s+k, c}  over the k with s + k < T

Forward schedule: a program owns (batch and head, tile of positions) with all of the head's channels. The
filters are a tile of positions by taps, normalised in registers and saved; a tap is taken out of the tile by
a masked sum, so that x is read once a tap and nothing of size T K D exists.
Backward schedule: the same owner makes both gradients in one walk over the taps. Looking back k steps at x,
it dots with its own dy and puts the sums into column k of the tile dp; looking ahead k steps at dy, it
gathers the filter of that later position, whose tap k is the one that read it. The map from outputs to inputs
is static, so dx needs no atomics; K is small and the tiles overlap but for k rows, so the loads come from
cache. The softmax correction is one row sum at the end.

op: dynamic_conv
schedule: gather_transpose, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_T = 16


@triton.jit
def load_rows(ptr, rows, d, T, H, D):
    """Rows of one head; the pointer stands at its first row, and rows are H D apart."""
    mask = ((rows >= 0) & (rows < T))[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * H * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dynamic_conv_kernel(
    x_ptr, w_ptr, y_ptr, p_ptr, T, H, D, K,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // H * T * H + tl.program_id(0) % H
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    taps, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    at = (batch + t[:, None] * H) * K + taps[None, :]
    mask = (t[:, None] < T) & (taps[None, :] < K)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(taps[None, :] < K, w, -float("inf"))
    e = tl.exp(w - tl.max(w, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    tl.store(p_ptr + at, p, mask=mask)
    y = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for k in range(K):
        own = tl.sum(tl.where(taps[None, :] == k, p, 0.0), axis=1)
        y += own[:, None] * load_rows(x_ptr + batch * D, t - k, d, T, H, D)
    y_mask = (t[:, None] < T) & (d[None, :] < D)
    offs = (batch + t[:, None] * H) * D + d[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=y_mask)


def blocks_of(D, K):
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_K": triton.next_power_of_2(K),
        "BLOCK_D": triton.next_power_of_2(D),
    }


def dynamic_conv_forward(x, w):
    B, T, H, D = x.shape
    K = w.shape[3]
    if D > 256 or K > 64:
        raise ValueError(f"{D} channels a head or {K} taps do not fit one tile")
    y = torch.empty_like(x)
    p = torch.empty(w.shape, device=w.device, dtype=torch.float32)
    dynamic_conv_kernel[(B * H, triton.cdiv(T, BLOCK_T))](x, w, y, p, T, H, D, K, **blocks_of(D, K))
    return y, p


@autodiff(inputs_require_grad=(0, 1))
def dynamic_conv(x, w):
    """x: (B, T, H, D); w: (B, T, H, K), logits of the filters, tap k reads k steps back."""
    return dynamic_conv_forward(x.contiguous(), w.contiguous())[0]


def reference(x, w):
    p, (K, T) = torch.softmax(w, dim=-1), (w.shape[3], x.shape[1])
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, K - 1, 0))
    return sum(p[..., k, None] * padded[:, K - 1 - k : K - 1 - k + T] for k in range(K))


SWEEP = [{"B": 8, "T": 2048, "H": 16, "D": 64, "K": 15}, {"B": 3, "T": 1001, "H": 12, "D": 80, "K": 31}]
SWEEP_CPU = [{"B": 2, "T": 23, "H": 3, "D": 8, "K": 5}, {"B": 1, "T": 37, "H": 1, "D": 20, "K": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H = dims["B"], dims["T"], dims["H"]
    x = torch.randn(B, T, H, dims["D"], device=device, dtype=dtype)
    return x, torch.randn(B, T, H, dims["K"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def dynamic_conv_backward_kernel(
    x_ptr, p_ptr, dy_ptr, dx_ptr, dw_ptr, T, H, D, K,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // H * T * H + tl.program_id(0) % H
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    taps, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    dy = load_rows(dy_ptr + batch * D, t, d, T, H, D)
    dp = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    dx = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for k in range(K):
        behind = load_rows(x_ptr + batch * D, t - k, d, T, H, D)
        dp = tl.where(taps[None, :] == k, tl.sum(dy * behind, axis=1)[:, None], dp)
        ahead = load_rows(dy_ptr + batch * D, t + k, d, T, H, D)
        later = tl.load(p_ptr + (batch + (t + k) * H) * K + k, mask=t + k < T, other=0.0)
        dx += later[:, None] * ahead
    at = (batch + t[:, None] * H) * K + taps[None, :]
    mask = (t[:, None] < T) & (taps[None, :] < K)
    p = tl.load(p_ptr + at, mask=mask, other=0.0)
    dw = p * (dp - tl.sum(p * dp, axis=1)[:, None])
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=mask)
    offs = (batch + t[:, None] * H) * D + d[None, :]
    dx_mask = (t[:, None] < T) & (d[None, :] < D)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=dx_mask)


class DynamicConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        y, p = dynamic_conv_forward(x, w)
        ctx.save_for_backward(x, p)
        ctx.w_dtype = w.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, p = ctx.saved_tensors
        (B, T, H, D), K = x.shape, p.shape[3]
        dx, dw = torch.empty_like(x), torch.empty(p.shape, device=p.device, dtype=ctx.w_dtype)
        dynamic_conv_backward_kernel[(B * H, triton.cdiv(T, BLOCK_T))](
            x, p, dy.contiguous(), dx, dw, T, H, D, K, **blocks_of(D, K)
        )
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dw if needs[1] else None


def dynamic_conv_autograd(x, w):
    return DynamicConv.apply(x, w)
