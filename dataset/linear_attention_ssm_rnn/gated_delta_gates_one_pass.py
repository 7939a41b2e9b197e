"""The gates of a gated delta-rule layer, forget and write, from their two projections in one pass.

Forward    u_th = a_th + c_h,   g_th = -e^{l_h} softplus(u_th)  (the logarithm of the forget gate),
           beta_th = sigmoid(b_th)      (per token and head; l and c one number a head)
Backward   with p and r the gradients of g and beta:   da_th = -p_th e^{l_h} sigmoid(u_th),
           dc_h = sum_t da_th,   dl_h = sum_t p_th g_th,   db_th = r_th beta_th (1 - beta_th)

Forward schedule: a program owns a tile of (tokens, heads); both outputs in float32, which the recurrence
behind them wants, whatever the projections are in.
Backward schedule: heads are few (a few dozen) and tokens many, so a program takes a run of token tiles with
all the heads of its columns: da and db are pointwise, and the two parameters' sums over the run stay in
registers as tiles, reduced over rows once, at the end of the run, into a slot of the program. A second kernel
adds the slots. g is its own derivative in l, so dl takes g as saved, and softplus is not made again.

op: gated_delta_gates
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 32, "BLOCK_H": 32}


@triton.jit
def load_head(ptr, heads, H):
    return tl.load(ptr + heads, mask=heads < H, other=0.0).to(tl.float32)


@triton.jit
def load_tile(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def softplus(u):
    """By selections, which unlike abs have the right slope at 0; a series where 1 + e would lose digits."""
    e = tl.exp(tl.where(u > 0, -u, u))
    series = e * (1 - e * (1.0 / 2 - e * (1.0 / 3 - e * (1.0 / 4 - e / 5))))
    return tl.where(u > 0, u, 0.0) + tl.where(e < 0.03, series, tl.log(1.0 + e))


@triton.jit
def gates_kernel(
    a_ptr, b_ptr, c_ptr, l_ptr, g_ptr, beta_ptr, T, H, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (rows < T)[:, None] & (heads < H)[None, :]
    offs = rows[:, None] * H + heads[None, :]
    u = load_tile(a_ptr, offs, mask) + load_head(c_ptr, heads, H)[None, :]
    rate = tl.exp(load_head(l_ptr, heads, H))
    tl.store(g_ptr + offs, -rate[None, :] * softplus(u), mask=mask)
    tl.store(beta_ptr + offs, tl.sigmoid(load_tile(b_ptr, offs, mask)), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gated_delta_gates(a, b, c, log_rate):
    """a, b: (T, H); c, log_rate: (H). Gives g and beta, (T, H) in float32."""
    a, b, c, log_rate = a.contiguous(), b.contiguous(), c.contiguous(), log_rate.contiguous()
    T, H = a.shape
    if b.shape != a.shape or not c.shape == log_rate.shape == (H,):
        raise ValueError("a and b must have one shape, and c and log_rate one number a head")
    g, beta = (torch.empty(a.shape, device=a.device, dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(H, TILE["BLOCK_H"]))
    gates_kernel[grid](a, b, c, log_rate, g, beta, T, H, **TILE)
    return g, beta


def reference(a, b, c, log_rate):
    dtype = torch.promote_types(a.dtype, torch.float32)
    u = a.to(dtype) + c.to(dtype)
    return -log_rate.to(dtype).exp() * torch.nn.functional.softplus(u), torch.sigmoid(b.to(dtype))


SWEEP = [{"T": 65536, "H": 32}, {"T": 20011, "H": 48}]
SWEEP_CPU = [{"T": 41, "H": 5}, {"T": 70, "H": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, H = dims["T"], dims["H"]
    a, b = (torch.randn(T, H, device=device, dtype=dtype) for _ in range(2))
    c = torch.randn(H, device=device, dtype=dtype) - 3
    return a, b, c, 0.5 * torch.randn(H, device=device, dtype=dtype)


# ---- backward ----

MAX_RUNS = 128  # about one program a multiprocessor


@triton.jit
def gates_backward_kernel(
    a_ptr, c_ptr, l_ptr, g_ptr, beta_ptr, dg_ptr, dbeta_ptr, da_ptr, db_ptr, slots_ptr, T, H, tiles,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, rate = load_head(c_ptr, heads, H), tl.exp(load_head(l_ptr, heads, H))
    dc = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    dl = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    for tile in range(tiles):
        rows = (run * tiles + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (rows < T)[:, None] & (heads < H)[None, :]
        offs = rows[:, None] * H + heads[None, :]
        p, beta = load_tile(dg_ptr, offs, mask), load_tile(beta_ptr, offs, mask)
        da = -p * rate[None, :] * tl.sigmoid(load_tile(a_ptr, offs, mask) + c[None, :])
        db = load_tile(dbeta_ptr, offs, mask) * beta * (1 - beta)
        tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + offs, db.to(db_ptr.dtype.element_ty), mask=mask)
        dc += da
        dl += p * load_tile(g_ptr, offs, mask)
    tl.store(slots_ptr + 2 * run * H + heads, tl.sum(dc, axis=0), mask=heads < H)
    tl.store(slots_ptr + (2 * run + 1) * H + heads, tl.sum(dl, axis=0), mask=heads < H)


@triton.jit
def sum_slots_kernel(slots_ptr, dc_ptr, dl_ptr, runs, H, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    dc = tl.zeros([BLOCK_R, BLOCK_H], dtype=tl.float32)
    dl = tl.zeros([BLOCK_R, BLOCK_H], dtype=tl.float32)
    for start in range(0, runs, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r < runs)[:, None] & (heads < H)[None, :]
        offs = 2 * r[:, None] * H + heads[None, :]
        dc += tl.load(slots_ptr + offs, mask=mask, other=0.0)
        dl += tl.load(slots_ptr + offs + H, mask=mask, other=0.0)
    tl.store(dc_ptr + heads, tl.sum(dc, axis=0).to(dc_ptr.dtype.element_ty), mask=heads < H)
    tl.store(dl_ptr + heads, tl.sum(dl, axis=0).to(dl_ptr.dtype.element_ty), mask=heads < H)


class GatedDeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c, log_rate):
        a, c, log_rate = a.contiguous(), c.contiguous(), log_rate.contiguous()
        g, beta = gated_delta_gates(a, b, c, log_rate)
        ctx.save_for_backward(a, c, log_rate, g, beta)
        ctx.b_dtype = b.dtype
        return g, beta

    @staticmethod
    def backward(ctx, dg, dbeta):
        a, c, log_rate, g, beta = ctx.saved_tensors
        (T, H), needs = a.shape, ctx.needs_input_grad
        all_tiles, columns = triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(H, TILE["BLOCK_H"])
        tiles = max(1, triton.cdiv(all_tiles, MAX_RUNS))
        runs = triton.cdiv(all_tiles, tiles)
        da, dc, dl = torch.empty_like(a), torch.empty_like(c), torch.empty_like(log_rate)
        db = torch.empty(a.shape, device=a.device, dtype=ctx.b_dtype)
        slots = torch.empty((runs, 2, H), device=a.device, dtype=torch.float32)
        gates_backward_kernel[(runs, columns)](
            a, c, log_rate, g, beta, dg.contiguous(), dbeta.contiguous(), da, db, slots, T, H, tiles, **TILE
        )
        if needs[2] or needs[3]:
            sum_slots_kernel[(columns,)](slots, dc, dl, runs, H, BLOCK_R=32, BLOCK_H=TILE["BLOCK_H"])
        grads = zip((da, db, dc, dl), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def gated_delta_gates_autograd(a, b, c, log_rate):
    return GatedDeltaGates.apply(a, b, c, log_rate)
