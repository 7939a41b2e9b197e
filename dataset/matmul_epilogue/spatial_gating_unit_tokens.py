"""Spatial gating: one matrix mixes the tokens of a sequence, and the result gates a second set of channels.

Forward    Z_bsc = sum_t W_st X_btc + v_s,   Y = U * Z;   X (B, T, C), W (S, T), v (S), U, Y (B, S, C)
Backward   dU = dY * Z,   G = dY * U:   dX_btc = sum_s W_st G_bsc,   dW_st = sum_bc G_bsc X_btc,
           dv_s = sum_bc G_bsc

Forward schedule: the mixed axis stands before the channels, so with (b, c) as one index q this is a single
product of W with a matrix of T rows and B C columns that nobody has to build: column q stands at b T C + c,
its rows C apart. A program owns (tile of q, tile of s), stores Z and gates it in its epilogue.
Backward schedule: G is wanted by two products and dv, dU needs Z: one pointwise pass over dY makes both, and
both products are plain. dX is the forward's product with W read transposed. dW is small and its sum long, B C
is tens of thousands: a handful of owners would walk all of it while the rest of the GPU waits. So the columns
are split into parts, (part, tile of W) stores a partial tile, and a second kernel adds the parts in order. dv
rides with the first column of those tiles, one row sum a step, in slots of its own.

op: spatial_gating
schedule: swap_owner, partials_then_reduce
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
def places(t, q, T, C):
    """Where the tile (t, q) of a (B, T, C) tensor stands, q counting (b, c)."""
    return (q // C).to(tl.int64)[None, :] * T * C + t[:, None].to(tl.int64) * C + (q % C)[None, :]


@triton.jit
def load_columns(ptr, t, q, end, T, C):
    mask = (t[:, None] < T) & (q[None, :] < end)
    return tl.load(ptr + places(t, q, T, C), mask=mask, other=0.0)


@triton.jit
def mix_tile(
    x_ptr, w_ptr, q, s, Q, T, S, C, stride_ws, stride_wt, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    """Tile (s, q) of W X, in float32."""
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        w_offs = s[:, None] * stride_ws + t[None, :] * stride_wt
        w = tl.load(w_ptr + w_offs, mask=(s[:, None] < S) & (t[None, :] < T), other=0.0)
        acc = tl.dot(w, load_columns(x_ptr, t, q, Q, T, C), acc, input_precision=PRECISION)
    return acc


@triton.jit
def gating_kernel(
    x_ptr, u_ptr, w_ptr, v_ptr, z_ptr, y_ptr, Q, T, S, C, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = mix_tile(x_ptr, w_ptr, q, s, Q, T, S, C, T, 1, PRECISION, BLOCK)
    z += tl.load(v_ptr + s, mask=s < S, other=0.0).to(tl.float32)[:, None]
    offs, mask = places(s, q, S, C), (s[:, None] < S) & (q[None, :] < Q)
    u = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(z_ptr + offs, z.to(z_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offs, (u * z).to(y_ptr.dtype.element_ty), mask=mask)


def spatial_gating_forward(x, u, w, v):
    (B, T, C), S, tiles = x.shape, w.shape[0], tiling(x)
    if w.shape[1] != T or u.shape != (B, S, C) or v.shape != (S,) or B * C >= 2**31:
        raise ValueError(f"x {tuple(x.shape)}, u {tuple(u.shape)} and w {tuple(w.shape)} do not fit")
    z, y = torch.empty_like(u), torch.empty_like(u)
    grid = (triton.cdiv(B * C, tiles["BLOCK"]), triton.cdiv(S, tiles["BLOCK"]))
    gating_kernel[grid](x, u, w, v, z, y, B * C, T, S, C, **tiles)
    return y, z


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def spatial_gating(x, u, w, v):
    """x: (B, T, C); u: (B, S, C); w: (S, T); v: (S); gives (B, S, C). Mostly S is T."""
    return spatial_gating_forward(x.contiguous(), u.contiguous(), w.contiguous(), v.contiguous())[0]


def reference(x, u, w, v):
    return u * (torch.einsum("st,btc->bsc", w, x) + v[:, None])


SWEEP = [{"B": 128, "T": 256, "C": 768, "S": 256}, {"B": 61, "T": 197, "C": 500, "S": 190}]
SWEEP_CPU = [{"B": 3, "T": 20, "C": 13, "S": 22}, {"B": 2, "T": 35, "C": 40, "S": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C, S = (dims[name] for name in ("B", "T", "C", "S"))
    x, u = (torch.randn(B, size, C, device=device, dtype=dtype) for size in (T, S))
    w = torch.randn(S, T, device=device, dtype=dtype) / max(1, T) ** 0.5
    return x, u, w, torch.randn(S, device=device, dtype=dtype)


# ---- backward ----

PROGRAMS = 1024  # tiles of dW times parts: enough to fill a GPU


@triton.jit
def gate_kernel(u_ptr, z_ptr, dy_ptr, du_ptr, g_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    du = dy * tl.load(z_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    g = dy * tl.load(u_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(du_ptr + i, du.to(du_ptr.dtype.element_ty), mask=i < size)
    tl.store(g_ptr + i, g.to(g_ptr.dtype.element_ty), mask=i < size)


@triton.jit
def dx_kernel(g_ptr, w_ptr, dx_ptr, Q, T, S, C, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = mix_tile(g_ptr, w_ptr, q, t, Q, S, T, C, 1, T, PRECISION, BLOCK)
    mask = (t[:, None] < T) & (q[None, :] < Q)
    tl.store(dx_ptr + places(t, q, T, C), dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_slot_kernel(
    x_ptr, g_ptr, dw_slots_ptr, dv_slots_ptr, Q, T, S, C, part, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.program_id(2)
    end = tl.minimum((slot + 1) * part, Q)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(slot * part, end, BLOCK):
        q = start + tl.arange(0, BLOCK)
        g = load_columns(g_ptr, s, q, end, S, C)
        x = load_columns(x_ptr, t, q, end, T, C)
        dw = tl.dot(g, tl.trans(x), dw, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            dv += tl.sum(g.to(tl.float32), axis=1)
    offs = (slot.to(tl.int64) * S + s[:, None]) * T + t[None, :]
    tl.store(dw_slots_ptr + offs, dw, mask=(s[:, None] < S) & (t[None, :] < T))
    if tl.program_id(1) == 0:
        tl.store(dv_slots_ptr + slot * S + s, dv, mask=s < S)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(slots):
        total += tl.load(slots_ptr + i, mask=i < size, other=0.0)
        slots_ptr += size
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < size)


def weight_gradients(x, g, w, v):
    (B, T, C), S, tiles = x.shape, w.shape[0], tiling(x)
    Q, BLOCK = B * C, tiles["BLOCK"]
    across = (triton.cdiv(S, BLOCK), max(1, triton.cdiv(T, BLOCK)))  # dv is stored where T is 0, too
    wanted = triton.cdiv(PROGRAMS, max(1, across[0] * across[1]))
    part = max(1, triton.cdiv(Q, wanted * BLOCK)) * BLOCK
    slots = triton.cdiv(Q, part)
    dw_slots = torch.empty((slots, S, T), device=x.device, dtype=torch.float32)
    dv_slots = torch.empty((slots, S), device=x.device, dtype=torch.float32)
    dw_slot_kernel[(*across, slots)](x, g, dw_slots, dv_slots, Q, T, S, C, part, **tiles)
    dw, dv = torch.empty_like(w), torch.empty_like(v)
    sum_slots_kernel[(triton.cdiv(S * T, 256),)](dw_slots, dw, slots, S * T, BLOCK=256)
    sum_slots_kernel[(triton.cdiv(S, 256),)](dv_slots, dv, slots, S, BLOCK=256)
    return dw, dv


class SpatialGating(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, w, v):
        x, u, w, v = x.contiguous(), u.contiguous(), w.contiguous(), v.contiguous()
        y, z = spatial_gating_forward(x, u, w, v)
        ctx.save_for_backward(x, u, w, v, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, u, w, v, z = ctx.saved_tensors
        (B, T, C), S, tiles, needs = x.shape, w.shape[0], tiling(x), ctx.needs_input_grad
        du, g = torch.empty_like(u), torch.empty_like(u)
        gate_kernel[(triton.cdiv(u.numel(), 1024),)](u, z, dy.contiguous(), du, g, u.numel(), BLOCK=1024)
        dx = dw = dv = None
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(B * C, tiles["BLOCK"]), triton.cdiv(T, tiles["BLOCK"]))
            dx_kernel[grid](g, w, dx, B * C, T, S, C, **tiles)
        if needs[2] or needs[3]:
            dw, dv = weight_gradients(x, g, w, v)
        return dx, du if needs[1] else None, dw if needs[2] else None, dv if needs[3] else None


def spatial_gating_autograd(x, u, w, v):
    return SpatialGating.apply(x, u, w, v)
