"""Token shift: half of the channels come from the token before, within a packed document.

Forward    y_tc = x_{t-1,c} for c < S, and x_tc for the others; at a document's first token, where s_t is set,
           there is none before:  y_tc = 0 for c < S
Backward   token t is read by t for the upper channels and by t + 1 for the lower:
           dx_tc = dy_tc for c >= S;   dx_tc = dy_{t+1,c} for c < S, or 0 where t is the last or s_{t+1} set

Forward schedule: a program owns a tile of (tokens, channels); a lane loads from its token or the one before,
by its channel: one load for each element, and no tensor is shifted or concatenated.
Backward schedule: the map is static but for the flags, and each x is read by exactly one y, or by none. So it
is inverted by hand: the owner of a tile of dx loads from its token or the one after, one read and one write,
where a scatter would need dx zeroed first. The flag to ask is that of the reader, t + 1. Packing costs one
byte a token and nothing else.

op: token_shift
schedule: gather_transpose
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 16, "BLOCK_C": 128}


@triton.jit
def shift_kernel(x_ptr, start_ptr, y_ptr, T, C, S, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(start_ptr + t, mask=t < T, other=0).to(tl.int1) | (t == 0)
    shifted = (c < S)[None, :]
    inside = (t < T)[:, None] & (c < C)[None, :]
    source = tl.where(shifted, t[:, None] - 1, t[:, None])
    x = tl.load(x_ptr + source * C + c[None, :], mask=inside & ~(shifted & start[:, None]), other=0.0)
    tl.store(y_ptr + t[:, None] * C + c[None, :], x, mask=inside)


@autodiff(inputs_require_grad=(0,))
def token_shift(x, starts, shifted):
    """x: (T, C), packed documents; starts: bool (T), true at first tokens; shifted: channels that move."""
    x, starts, (T, C) = x.contiguous(), starts.contiguous(), x.shape
    if starts.shape != (T,):
        raise ValueError("starts must have one flag a token")
    y = torch.empty_like(x)
    grid = (triton.cdiv(C, TILE["BLOCK_C"]), triton.cdiv(T, TILE["BLOCK_T"]))
    shift_kernel[grid](x, starts, y, T, C, shifted, **TILE)
    return y


def reference(x, starts, shifted):
    before = torch.nn.functional.pad(x[:, :shifted], (0, 0, 1, 0))[:-1]
    return torch.cat([before.masked_fill(starts[:, None], 0.0), x[:, shifted:]], dim=1)


SWEEP = [{"T": 65536, "C": 2048}, {"T": 20011, "C": 1000}]
SWEEP_CPU = [{"T": 45, "C": 30}, {"T": 16, "C": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["T"], dims["C"], device=device, dtype=dtype)
    return x, torch.rand(dims["T"], device=device) < 0.1, dims["C"] // 2


# ---- backward ----


@triton.jit
def shift_backward_kernel(dy_ptr, start_ptr, dx_ptr, T, C, S, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    unread = tl.load(start_ptr + t + 1, mask=t + 1 < T, other=1).to(tl.int1)  # nobody reads past an end
    shifted = (c < S)[None, :]
    inside = (t < T)[:, None] & (c < C)[None, :]
    reader = tl.where(shifted, t[:, None] + 1, t[:, None])
    dx = tl.load(dy_ptr + reader * C + c[None, :], mask=inside & ~(shifted & unread[:, None]), other=0.0)
    tl.store(dx_ptr + t[:, None] * C + c[None, :], dx, mask=inside)


class TokenShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, starts, shifted):
        starts = starts.contiguous()
        ctx.save_for_backward(starts)
        ctx.shifted = shifted
        return token_shift(x, starts, shifted)

    @staticmethod
    def backward(ctx, dy):
        (starts,) = ctx.saved_tensors
        dy, (T, C) = dy.contiguous(), dy.shape
        dx = torch.empty_like(dy)
        grid = (triton.cdiv(C, TILE["BLOCK_C"]), triton.cdiv(T, TILE["BLOCK_T"]))
        shift_backward_kernel[grid](dy, starts, dx, T, C, ctx.shifted, **TILE)
        return dx, None, None


def token_shift_autograd(x, starts, shifted):
    return TokenShift.apply(x, starts, shifted)
