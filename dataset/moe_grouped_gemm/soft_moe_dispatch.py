"""Soft mixture of experts, dispatch: every slot is a weighted mean of all tokens.

Forward    L_ts = <x_t, f_s>,   P_ts = exp(L_ts - l_s),  l_s = log sum_t exp(L_ts): a softmax over tokens;
           z_s = sum_t P_ts x_t;   x (B, T, D) tokens, f (D, S) one vector a slot, z (B, S, D)
Backward   dP_ts = <x_t, dz_s>,   dL_ts = P_ts (dP_ts - e_s) with e_s = sum_t P_ts dP_ts = <z_s, dz_s>;
           dx_t = sum_s P_ts dz_s + sum_s dL_ts f_s,   df_s = sum over batch and t of dL_ts x_t

Forward schedule: D is a model's width and fits no tile, so logits are made by a product of their own and
stored, (T, S) numbers. Owners of tiles of slots walk the tokens for l. Then (tile of slots, tile of D) owners
walk the tokens again, and P is made from L on load.
Backward schedule: x stands in z twice, as what is weighted and in the weights. e comes from z itself, so that
dL is one product with a pointwise end, by owners of its tiles. dx's owner walks the slots once and adds both
of its sums into one accumulator, two dots a step. df sums over all tokens of the batch; its owners walk them
as one long list of rows, since f knows no samples.

op: soft_moe
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_weights(logit_ptr, lse_ptr, t, s, T, S):
    """A tile of P, of one sample; 0 outside."""
    lse = tl.load(lse_ptr + s, mask=s < S, other=0.0)
    p = tl.exp(load_tile(logit_ptr, t, s, T, S) - lse[None, :])
    return tl.where((t[:, None] < T) & (s[None, :] < S), p, 0.0)


@triton.jit
def logit_kernel(x_ptr, f_ptr, logit_ptr, R, S, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        f = load_tile(f_ptr, d, s, D, S)
        logit = tl.dot(load_tile(x_ptr, row, d, R, D), f, logit, input_precision=PRECISION)
    store_tile(logit_ptr, logit, row, s, R, S)


@triton.jit
def lse_kernel(logit_ptr, lse_ptr, T, S, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    largest = tl.full([BLOCK_S], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_S], dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        logit = load_tile(logit_ptr + sample * T * S, t, s, T, S)
        logit = tl.where(t[:, None] < T, logit, -float("inf"))
        larger = tl.maximum(largest, tl.max(logit, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit - larger[None, :]), axis=0)
        largest = larger
    tl.store(lse_ptr + sample * S + s, largest + tl.log(total), mask=s < S)


@triton.jit
def slot_kernel(x_ptr, logit_ptr, lse_ptr, z_ptr, T, S, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(2).to(tl.int64)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        p = load_weights(logit_ptr + sample * T * S, lse_ptr + sample * S, t, s, T, S)
        x = load_tile(x_ptr + sample * T * D, t, d, T, D)
        z = tl.dot(tl.trans(p.to(x.dtype)), x, z, input_precision=PRECISION)
    store_tile(z_ptr + sample * S * D, z, s, d, S, D)


def soft_dispatch_forward(x, f):
    (B, T, D), S, tiles = x.shape, f.shape[1], tiling(x)
    if f.shape[0] != D or T == 0:
        raise ValueError(f"x {tuple(x.shape)} and f {tuple(f.shape)} do not fit, or there are no tokens")
    logit, lse = (torch.empty(size, device=x.device, dtype=torch.float32) for size in ((B, T, S), (B, S)))
    z = torch.empty((B, S, D), device=x.device, dtype=x.dtype)
    slots, deep = triton.cdiv(S, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"])
    logit_kernel[(triton.cdiv(B * T, tiles["BLOCK"]), slots)](x, f, logit, B * T, S, D, **tiles)
    lse_kernel[(triton.cdiv(S, 32), B)](logit, lse, T, S, BLOCK_T=32, BLOCK_S=32)
    slot_kernel[(slots, deep, B)](x, logit, lse, z, T, S, D, **tiles)
    return z, logit, lse


@autodiff(inputs_require_grad=(0, 1))
def soft_moe_dispatch(x, f):
    """x: (B, T, D); f: (D, S), S slots; gives (B, S, D)."""
    return soft_dispatch_forward(x.contiguous(), f.contiguous())[0]


def reference(x, f):
    return torch.einsum("bts,btd->bsd", torch.softmax(x @ f, dim=1), x)


SWEEP = [{"B": 64, "T": 256, "D": 768, "S": 256}, {"B": 31, "T": 197, "D": 500, "S": 100}]
SWEEP_CPU = [{"B": 2, "T": 35, "D": 33, "S": 8}, {"B": 3, "T": 9, "D": 16, "S": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D, S = (dims[name] for name in ("B", "T", "D", "S"))
    x = torch.randn(B, T, D, device=device, dtype=dtype)
    return x, torch.randn(D, S, device=device, dtype=dtype) / max(1, D) ** 0.5


# ---- backward ----


@triton.jit
def slot_dot_kernel(z_ptr, dz_ptr, e_ptr, R, D, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        z = load_tile(z_ptr, row, d, R, D).to(tl.float32)
        e += tl.sum(z * load_tile(dz_ptr, row, d, R, D).to(tl.float32), axis=1)
    tl.store(e_ptr + row, e, mask=row < R)


@triton.jit
def dlogit_kernel(
    x_ptr, logit_ptr, lse_ptr, dz_ptr, e_ptr, dlogit_ptr, T, S, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(2).to(tl.int64)
    dp = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        dz = tl.trans(load_tile(dz_ptr + sample * S * D, s, d, S, D))
        dp = tl.dot(load_tile(x_ptr + sample * T * D, t, d, T, D), dz, dp, input_precision=PRECISION)
    p = load_weights(logit_ptr + sample * T * S, lse_ptr + sample * S, t, s, T, S)
    e = tl.load(e_ptr + sample * S + s, mask=s < S, other=0.0)
    store_tile(dlogit_ptr + sample * T * S, p * (dp - e[None, :]), t, s, T, S)


@triton.jit
def dx_kernel(
    logit_ptr, lse_ptr, dz_ptr, dlogit_ptr, f_ptr, dx_ptr, T, S, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(2).to(tl.int64)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        p = load_weights(logit_ptr + sample * T * S, lse_ptr + sample * S, t, s, T, S)
        dz = load_tile(dz_ptr + sample * S * D, s, d, S, D)
        dx = tl.dot(p.to(dz.dtype), dz, dx, input_precision=PRECISION)
        f = tl.trans(load_tile(f_ptr, d, s, D, S))
        dx = tl.dot(load_tile(dlogit_ptr + sample * T * S, t, s, T, S), f, dx, input_precision=PRECISION)
    store_tile(dx_ptr + sample * T * D, dx, t, d, T, D)


@triton.jit
def df_kernel(x_ptr, dlogit_ptr, df_ptr, R, S, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    df = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, R, BLOCK):
        row = start + tl.arange(0, BLOCK)
        x = tl.trans(load_tile(x_ptr, row, d, R, D))
        df = tl.dot(x, load_tile(dlogit_ptr, row, s, R, S), df, input_precision=PRECISION)
    store_tile(df_ptr, df, d, s, D, S)


class SoftMoEDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f):
        x, f = x.contiguous(), f.contiguous()
        z, logit, lse = soft_dispatch_forward(x, f)
        ctx.save_for_backward(x, f, z, logit, lse)
        return z

    @staticmethod
    def backward(ctx, dz):
        x, f, z, logit, lse = ctx.saved_tensors
        dz, (B, T, D), S, tiles, needs = dz.contiguous(), x.shape, f.shape[1], tiling(x), ctx.needs_input_grad
        tokens, slots, deep = (triton.cdiv(size, tiles["BLOCK"]) for size in (T, S, D))
        e, dlogit = torch.empty_like(lse), torch.empty((B, T, S), device=x.device, dtype=x.dtype)
        slot_dot_kernel[(triton.cdiv(B * S, 32),)](z, dz, e, B * S, D, BLOCK=32)
        dlogit_kernel[(tokens, slots, B)](x, logit, lse, dz, e, dlogit, T, S, D, **tiles)
        dx = df = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(tokens, deep, B)](logit, lse, dz, dlogit, f, dx, T, S, D, **tiles)
        if needs[1]:
            df = torch.empty_like(f)
            df_kernel[(deep, slots)](x, dlogit, df, B * T, S, D, **tiles)
        return dx, df


def soft_moe_dispatch_autograd(x, f):
    return SoftMoEDispatch.apply(x, f)
