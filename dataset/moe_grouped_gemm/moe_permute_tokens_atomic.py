"""Mixture of experts: tokens copied to the slots of their experts; the way back by atomics.

Forward    Xs_i = x_{t_i}   for the slots i, sorted by expert; a token has any number of slots
Backward   dx_t = sum over the slots i with t_i = t of dXs_i

Forward schedule: a program owns a slot and a tile of its columns, and gathers the row of its token.
Backward schedule: the same owners. A slot's program adds its row to its token's by atomics, in float32, from
zeros. That is right when the inverse map, from tokens to their slots, is not at hand and not wanted: when
experts drop tokens or tokens choose different numbers of experts, so that there is no table of k slots a
token. A token has a few slots, on different experts, so two programs seldom meet on one address at the same
time, and the traffic is that of a copy with one more read. The price is a float32 buffer, a pass that rounds
it for short dtypes, and an order of additions, so a last bit, that differs between runs.

op: moe_permute
schedule: atomic_accumulate
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 512


@triton.jit
def permute_kernel(x_ptr, token_ptr, xs_ptr, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.load(token_ptr + slot) * D + d, mask=d < D, other=0.0)
    tl.store(xs_ptr + slot * D + d, x, mask=d < D)


@autodiff(inputs_require_grad=(0,))
def moe_permute(x, token):
    """x: (T, D); token: int64 (slots), all below T; gives (slots, D)."""
    x, token, D = x.contiguous(), token.contiguous(), x.shape[1]
    xs = torch.empty((token.numel(), D), device=x.device, dtype=x.dtype)
    permute_kernel[(token.numel(), triton.cdiv(D, BLOCK))](x, token, xs, D, BLOCK=BLOCK)
    return xs


def reference(x, token):
    return x[token]


SWEEP = [{"T": 16384, "E": 64, "D": 2048}, {"T": 8191, "E": 8, "D": 5000}]
SWEEP_CPU = [{"T": 33, "E": 4, "D": 36}, {"T": 10, "E": 3, "D": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E = dims["T"], dims["E"]
    chosen = torch.rand(E, T, device=device) < 2 / max(1, E)  # two experts a token on average, some none
    return torch.randn(T, dims["D"], device=device, dtype=dtype), chosen.nonzero()[:, 1]


# ---- backward ----


@triton.jit
def permute_backward_kernel(dxs_ptr, token_ptr, dx_ptr, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dxs = tl.load(dxs_ptr + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.atomic_add(dx_ptr + tl.load(token_ptr + slot) * D + d, dxs, mask=d < D, sem="relaxed")


class MoEPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.save_for_backward(token.contiguous())
        ctx.shape = x.shape
        return moe_permute(x, token)

    @staticmethod
    def backward(ctx, dxs):
        (token,) = ctx.saved_tensors
        D, dx = ctx.shape[1], torch.zeros(ctx.shape, device=dxs.device, dtype=torch.float32)
        grid = (token.numel(), triton.cdiv(D, BLOCK))
        permute_backward_kernel[grid](dxs.contiguous(), token, dx, D, BLOCK=BLOCK)
        return dx.to(dxs.dtype), None


def moe_permute_autograd(x, token):
    return MoEPermute.apply(x, token)
