"""Combine where experts choose tokens: a token's result is the sum over the experts that picked it.

Forward    slot s of the E C slots holds token t_s, with gate g_s and the expert's row Z_s:
           y_t = sum over the slots s with t_s = t of g_s Z_s   (0 for a token that nobody picked)
Backward   dZ_s = g_s dy_{t_s},   dg_s = <dy_{t_s}, Z_s>

Forward schedule: a program owns a slot and adds its row to its token by atomics, into float32 zeros. A token
has any number of slots, E at most, and mostly few, so collisions are rare.
Backward schedule: the transpose of a scatter is a gather, and it is easier than the forward. Both gradients
belong to a slot, and the slot's program reads the one row of dy that it needs. It multiplies that row with
g_s for dZ and with Z_s for the row dot dg, in one walk of the channels: no atomics, no inverse lists, no
order in which slots have to stand. That a token picked by many experts has its row of dy read several times
costs little, it is in cache.

op: expert_choice
schedule: row_reduce_correct, index_or_seed_replay
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


@triton.jit
def combine_kernel(z_ptr, g_ptr, token_ptr, y_ptr, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + slot)
    g = tl.load(g_ptr + slot).to(tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.atomic_add(y_ptr + token * D + d, g * z, mask=d < D, sem="relaxed")


@autodiff(inputs_require_grad=(0, 1))
def expert_choice_combine(z, g, token, tokens):
    """z: (E, C, D), rows of the experts; g: (E, C); token: int64 (E, C), all below tokens. (tokens, D)."""
    if g.shape != z.shape[:2] or token.shape != g.shape:
        raise ValueError(f"z {tuple(z.shape)}, g {tuple(g.shape)} and token {tuple(token.shape)} do not fit")
    z, g, token, D = z.contiguous(), g.contiguous(), token.contiguous(), z.shape[2]
    y = torch.zeros((tokens, D), device=z.device, dtype=torch.float32)
    combine_kernel[(token.numel(),)](z, g, token, y, D, BLOCK=tile_of(D))
    return y.to(z.dtype)


def reference(z, g, token, tokens):
    rows = (z * g[..., None]).flatten(0, 1)
    return torch.zeros(tokens, z.shape[2], device=z.device, dtype=z.dtype).index_add(0, token.flatten(), rows)


SWEEP = [{"T": 16384, "E": 32, "C": 1024, "D": 2048}, {"T": 8191, "E": 7, "C": 1999, "D": 1000}]
SWEEP_CPU = [{"T": 31, "E": 4, "C": 9, "D": 24}, {"T": 20, "E": 3, "C": 13, "D": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E, C, D = (dims[name] for name in ("T", "E", "C", "D"))
    scores = torch.rand(E, T, device=device)
    g, token = scores.topk(min(C, T), dim=1)  # each expert's best tokens
    return torch.randn(*token.shape, D, device=device, dtype=dtype), g.to(dtype), token, T


# ---- backward ----


@triton.jit
def combine_backward_kernel(z_ptr, g_ptr, token_ptr, dy_ptr, dz_ptr, dg_ptr, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + slot)
    g = tl.load(g_ptr + slot).to(tl.float32)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(dz_ptr + slot * D + d, (g * dy).to(dz_ptr.dtype.element_ty), mask=d < D)
        dg += z * dy
    tl.store(dg_ptr + slot, tl.sum(dg, axis=0).to(dg_ptr.dtype.element_ty))


class ExpertChoiceCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, g, token, tokens):
        z, g, token = z.contiguous(), g.contiguous(), token.contiguous()
        ctx.save_for_backward(z, g, token)
        return expert_choice_combine(z, g, token, tokens)

    @staticmethod
    def backward(ctx, dy):
        z, g, token = ctx.saved_tensors
        D, needs = z.shape[2], ctx.needs_input_grad
        dz, dg = torch.empty_like(z), torch.empty_like(g)
        combine_backward_kernel[(token.numel(),)](z, g, token, dy.contiguous(), dz, dg, D, BLOCK=tile_of(D))
        return dz if needs[0] else None, dg if needs[1] else None, None, None


def expert_choice_combine_autograd(z, g, token, tokens):
    return ExpertChoiceCombine.apply(z, g, token, tokens)
