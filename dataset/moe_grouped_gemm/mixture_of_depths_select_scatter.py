"""Mixture of depths: a layer sees a few tokens of each sequence; the others pass by it.

Forward    slot s holds token t_s, with the router's gate g_s and the layer's result f_s:
           y_t = x_t + g_s f_s if some slot s holds t, and y_t = x_t otherwise
Backward   dx_t = dy_t,   df_s = g_s dy_{t_s},   dg_s = <dy_{t_s}, f_s>

Forward schedule: slots do not meet, so a program could own a slot; but every row of y has to be written. The
map of slots is inverted into one number a token (its slot, or -1), a program owns a token, and y is
written in one pass, copied and updated rows alike, without a clone that is then partly overwritten.
Backward schedule: the same owner by the same inverse map. It reads its row of dy, which is dx, and which
must be copied, as two tensors may not share storage; if the token has a slot, the row is in registers for df
and for the row dot of dg. Every slot has one token, so each df and dg is stored by exactly one program: no
scatter to follow the copy, no second read of dy, no atomics.

op: mixture_of_depths
schedule: index_or_seed_replay, row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(D):
    return min(1024, triton.next_power_of_2(D))


def slot_of_token(token, T):
    """The slot of every token of (B, T), -1 where it has none; int64 (B T)."""
    B, C = token.shape
    slot = torch.full((B, T), -1, device=token.device, dtype=torch.int64)
    return slot.scatter(1, token, torch.arange(B * C, device=token.device).view(B, C)).flatten()


@triton.jit
def depths_kernel(x_ptr, f_ptr, g_ptr, slot_ptr, y_ptr, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    has = slot >= 0
    g = tl.load(g_ptr + slot, mask=has, other=0.0).to(tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + slot * D + d, mask=has & (d < D), other=0.0).to(tl.float32)
        y = tl.where(has, x + g * f, x)
        tl.store(y_ptr + t * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def mixture_of_depths_forward(x, f, g, token):
    (B, T, D), C = x.shape, token.shape[1]
    if f.shape != (B, C, D) or g.shape != (B, C) or token.shape[0] != B:
        raise ValueError(f"x {tuple(x.shape)}, f {tuple(f.shape)}, g {tuple(g.shape)} do not fit")
    y, slot = torch.empty_like(x), slot_of_token(token, T)
    depths_kernel[(B * T,)](x, f, g, slot, y, D, BLOCK=tile_of(D))
    return y, slot


@autodiff(inputs_require_grad=(0, 1, 2))
def mixture_of_depths(x, f, g, token):
    """x: (B, T, D); f: (B, C, D); g: (B, C); token: int64 (B, C), different tokens of a sequence."""
    return mixture_of_depths_forward(x.contiguous(), f.contiguous(), g.contiguous(), token)[0]


def reference(x, f, g, token):
    index = token[..., None].expand(f.shape)
    return x.scatter_add(1, index, g[..., None] * f)


SWEEP = [{"B": 8, "T": 4096, "C": 512, "D": 2048}, {"B": 3, "T": 5001, "C": 1250, "D": 1000}]
SWEEP_CPU = [{"B": 2, "T": 20, "C": 5, "D": 28}, {"B": 3, "T": 7, "C": 3, "D": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    token = torch.rand(B, T, device=device).topk(min(dims["C"], T), dim=1).indices.sort(dim=1).values
    x = torch.randn(B, T, D, device=device, dtype=dtype)
    f = torch.randn(*token.shape, D, device=device, dtype=dtype)
    return x, f, torch.rand(token.shape, device=device, dtype=dtype), token


# ---- backward ----


@triton.jit
def depths_backward_kernel(f_ptr, g_ptr, slot_ptr, dy_ptr, dx_ptr, df_ptr, dg_ptr, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    has = slot >= 0
    g = tl.load(g_ptr + slot, mask=has, other=0.0).to(tl.float32)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + t * D + d, mask=d < D, other=0.0)
        tl.store(dx_ptr + t * D + d, dy, mask=d < D)
        mask = has & (d < D)
        f = tl.load(f_ptr + slot * D + d, mask=mask, other=0.0).to(tl.float32)
        tl.store(df_ptr + slot * D + d, (g * dy.to(tl.float32)).to(df_ptr.dtype.element_ty), mask=mask)
        dg += f * dy.to(tl.float32)
    tl.store(dg_ptr + slot, tl.sum(dg, axis=0).to(dg_ptr.dtype.element_ty), mask=has)


class MixtureOfDepths(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g, token):
        f, g = f.contiguous(), g.contiguous()
        y, slot = mixture_of_depths_forward(x.contiguous(), f, g, token)
        ctx.save_for_backward(f, g, slot)
        return y

    @staticmethod
    def backward(ctx, dy):
        f, g, slot = ctx.saved_tensors
        dy, D, needs = dy.contiguous(), dy.shape[2], ctx.needs_input_grad
        dx, df, dg = torch.empty_like(dy), torch.empty_like(f), torch.empty_like(g)
        depths_backward_kernel[(slot.numel(),)](f, g, slot, dy, dx, df, dg, D, BLOCK=tile_of(D))
        return dx if needs[0] else None, df if needs[1] else None, dg if needs[2] else None, None


def mixture_of_depths_autograd(x, f, g, token):
    return MixtureOfDepths.apply(x, f, g, token)
