"""The first kernel of a Mamba-2 layer: step sizes from their projections, and their decays summed by chunks.

Forward    u_t = z_t + b,   dt_t = softplus(u_t),   A = -e^{l},   s_t = sum over the chunk's steps up to t of
           A dt_t   (per head: l the logarithm of its rate, b its bias);  outputs dt and s, in float32
Backward   with p_t and r_t the gradients of dt_t and s_t:   R_t = sum over the chunk's steps from t on of r,
           dz_t = (p_t + A R_t) sigmoid(u_t),   db = sum over batch and time of dz_t,
           dl = A sum over batch and time of R_t dt_t,  as dA / dl = A

Forward schedule: a program owns (batch, chunk, tile of heads), with time along the other axis of its tile:
heads are contiguous, so loads coalesce, and the sum over time is one scan of the tile.
Backward schedule: the same owner. A sum up to t has a sum from t on as its adjoint, so the scan is run from
the other end and ends with the chunk, no carry between programs. u and dt are rebuilt from z, which costs an
exponential in place of a second tensor. l and b are read by all programs of a head: each stores its two sums
over the chunk in a slot, B chunks of them, and a second kernel adds the slots and multiplies by A, once.

op: ssd_dt_cumsum
schedule: reverse_scan, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_H = 16


@triton.jit
def log_1p(e):
    """log(1 + e) for 0 <= e <= 1, by a series where 1 + e would lose e's digits."""
    series = e * (1 - e * (1.0 / 2 - e * (1.0 / 3 - e * (1.0 / 4 - e / 5))))
    return tl.where(e < 0.03, series, tl.log(1.0 + e))


@triton.jit
def load_step_sizes(z_ptr, bias_ptr, offs, mask, heads, H):
    """u and softplus(u) of a tile; dt is 0 outside."""
    bias = tl.load(bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    u = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    small = tl.exp(tl.where(u > 0, -u, u))  # a selection: smooth at u = 0, where abs is not
    dt = tl.where(u > 0, u, 0.0) + log_1p(small)
    return u, tl.where(mask, dt, 0.0)


@triton.jit
def dt_cumsum_kernel(
    z_ptr, log_rate_ptr, bias_ptr, dt_ptr, sums_ptr, T, H, chunk, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * chunk + i
    mask = ((i < chunk) & (rows < T))[:, None] & (heads < H)[None, :]
    offs = (tl.program_id(2).to(tl.int64) * T + rows[:, None]) * H + heads[None, :]
    A = -tl.exp(tl.load(log_rate_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
    _, dt = load_step_sizes(z_ptr, bias_ptr, offs, mask, heads, H)
    tl.store(dt_ptr + offs, dt, mask=mask)
    tl.store(sums_ptr + offs, tl.cumsum(dt * A[None, :], axis=0), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def ssd_dt_cumsum(z, log_rate, bias, chunk=256):
    """z: (B, T, H); log_rate, bias: (H). Gives dt and its decays' sums in the chunk, (B, T, H) in float32."""
    z, log_rate, bias = z.contiguous(), log_rate.contiguous(), bias.contiguous()
    B, T, H = z.shape
    if log_rate.shape != (H,) or bias.shape != (H,):
        raise ValueError("log_rate and bias must have one number a head")
    if not 1 <= chunk <= 1024:
        raise ValueError(f"a chunk of {chunk} steps does not fit one tile")
    dt, sums = (torch.empty(z.shape, device=z.device, dtype=torch.float32) for _ in range(2))
    dt_cumsum_kernel[(triton.cdiv(H, BLOCK_H), triton.cdiv(T, chunk), B)](
        z, log_rate, bias, dt, sums, T, H, chunk, BLOCK_T=triton.next_power_of_2(chunk), BLOCK_H=BLOCK_H
    )
    return dt, sums


def reference(z, log_rate, bias, chunk=256):
    dtype = torch.promote_types(z.dtype, torch.float32)
    dt = torch.nn.functional.softplus(z.to(dtype) + bias.to(dtype))
    decay = -log_rate.to(dtype).exp() * dt
    sums = [decay[:, t : t + chunk].cumsum(1) for t in range(0, z.shape[1], chunk)]
    return dt, torch.cat(sums, dim=1)


SWEEP = [{"B": 8, "T": 4096, "H": 80, "Q": 256}, {"B": 3, "T": 2039, "H": 24, "Q": 128}]
SWEEP_CPU = [{"B": 2, "T": 41, "H": 5, "Q": 16}, {"B": 1, "T": 30, "H": 17, "Q": 12}]


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["B"], dims["T"], dims["H"], device=device, dtype=dtype)
    log_rate = 0.5 * torch.randn(dims["H"], device=device, dtype=dtype)
    return z, log_rate, torch.randn(dims["H"], device=device, dtype=dtype) - 2, dims["Q"]


# ---- backward ----


@triton.jit
def dt_cumsum_backward_kernel(
    z_ptr, log_rate_ptr, bias_ptr, ddt_ptr, dsums_ptr, dz_ptr, part_ptr, T, H, chunk,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * chunk + i
    mask = ((i < chunk) & (rows < T))[:, None] & (heads < H)[None, :]
    offs = (tl.program_id(2).to(tl.int64) * T + rows[:, None]) * H + heads[None, :]
    A = -tl.exp(tl.load(log_rate_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
    u, dt = load_step_sizes(z_ptr, bias_ptr, offs, mask, heads, H)
    later = tl.cumsum(tl.load(dsums_ptr + offs, mask=mask, other=0.0), axis=0, reverse=True)
    ddt = tl.load(ddt_ptr + offs, mask=mask, other=0.0) + A[None, :] * later
    dz = ddt * tl.sigmoid(u)
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tl.store(part_ptr + 2 * slot * H + heads, tl.sum(later * dt, axis=0), mask=heads < H)
    tl.store(part_ptr + (2 * slot + 1) * H + heads, tl.sum(tl.where(mask, dz, 0.0), axis=0), mask=heads < H)


@triton.jit
def head_sums_kernel(
    part_ptr, log_rate_ptr, dlog_rate_ptr, dbias_ptr, slots, H, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    dA = tl.zeros([BLOCK_S, BLOCK_H], dtype=tl.float32)
    db = tl.zeros([BLOCK_S, BLOCK_H], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s < slots)[:, None] & (heads < H)[None, :]
        offs = 2 * s[:, None] * H + heads[None, :]
        dA += tl.load(part_ptr + offs, mask=mask, other=0.0)
        db += tl.load(part_ptr + offs + H, mask=mask, other=0.0)
    A = -tl.exp(tl.load(log_rate_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
    dlog_rate = A * tl.sum(dA, axis=0)
    tl.store(dlog_rate_ptr + heads, dlog_rate.to(dlog_rate_ptr.dtype.element_ty), mask=heads < H)
    tl.store(dbias_ptr + heads, tl.sum(db, axis=0).to(dbias_ptr.dtype.element_ty), mask=heads < H)


class SsdDtCumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, log_rate, bias, chunk):
        z, log_rate, bias = z.contiguous(), log_rate.contiguous(), bias.contiguous()
        ctx.save_for_backward(z, log_rate, bias)
        ctx.chunk = chunk
        return ssd_dt_cumsum(z, log_rate, bias, chunk)

    @staticmethod
    def backward(ctx, ddt, dsums):
        z, log_rate, bias = ctx.saved_tensors
        (B, T, H), chunk, needs = z.shape, ctx.chunk, ctx.needs_input_grad
        chunks, tiles = triton.cdiv(T, chunk), triton.cdiv(H, BLOCK_H)
        dz, dlog_rate, dbias = torch.empty_like(z), torch.empty_like(log_rate), torch.empty_like(bias)
        part = torch.empty((B * chunks, 2, H), device=z.device, dtype=torch.float32)
        dt_cumsum_backward_kernel[(tiles, chunks, B)](
            z, log_rate, bias, ddt.contiguous(), dsums.contiguous(), dz, part, T, H, chunk,
            BLOCK_T=triton.next_power_of_2(chunk), BLOCK_H=BLOCK_H,
        )  # fmt: skip
        if needs[1] or needs[2]:
            head_sums_kernel[(tiles,)](
                part, log_rate, dlog_rate, dbias, B * chunks, H, BLOCK_S=32, BLOCK_H=BLOCK_H
            )
        grads = zip((dz, dlog_rate, dbias), needs[:3], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def ssd_dt_cumsum_autograd(z, log_rate, bias, chunk=256):
    return SsdDtCumsum.apply(z, log_rate, bias, chunk)
