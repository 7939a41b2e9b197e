"""A doubly gated short convolution: the cheap sequence mixer of hybrid models, three taps between two gates.

Forward    u_t = b_t * x_t,   s_t = sum_{j < K} w_j u_{t-j},   y_t = c_t * s_t
           (per channel; b, x and c are the thirds of one projection; u is 0 before the sequence)
Backward   e_t = dy_t * c_t is the gradient of s_t:   dc_t = dy_t * s_t,   du_t = sum_{j < K} w_j e_{t+j},
           db_t = du_t * x_t,   dx_t = du_t * b_t,   dw_j = sum over batch and time of e_t u_{t-j}

Forward schedule: a program owns a tile of (time, channels) of the packed projection and makes s from K
shifted loads of b and x, which mostly hit the cache. Nothing is saved.
Backward schedule: the taps are a static map, so the owner of a tile gathers: e from the K - 1 steps after it
for du, u from the K - 1 before it for s. With both in registers the three gradients of a step come at once
and go into one packed tensor, that of the projection, which is what the matrix product behind it reads. Each
tile also sums its K numbers dw a channel, as e and u are at hand, into a slot; a second kernel adds slots.
A scatter of e along the taps would need atomics, a saved s or u one more tensor each.

op: gated_short_conv
schedule: gather_transpose, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_T": 32, "BLOCK_C": 64}


@triton.jit
def load_third(p_ptr, rows, cols, third, T, C):
    """A tile of one third of the projection, 0 outside the sequence."""
    mask = ((rows >= 0) & (rows < T))[:, None] & (cols < C)[None, :]
    offs = rows[:, None] * 3 * C + third * C + cols[None, :]
    return tl.load(p_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_third(p_ptr, value, rows, cols, third, T, C):
    mask = (rows < T)[:, None] & (cols < C)[None, :]
    offs = rows[:, None] * 3 * C + third * C + cols[None, :]
    tl.store(p_ptr + offs, value.to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_tap(w_ptr, cols, j, C, K):
    return tl.load(w_ptr + cols * K + K - 1 - j, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def gated_conv_kernel(
    p_ptr, w_ptr, y_ptr, T, C, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = tl.program_id(2).to(tl.int64) * T
    p_ptr += batch * 3 * C
    s = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for j in tl.static_range(K):
        u = load_third(p_ptr, rows - j, cols, 0, T, C) * load_third(p_ptr, rows - j, cols, 2, T, C)
        s += load_tap(w_ptr, cols, j, C, K)[None, :] * u
    y = load_third(p_ptr, rows, cols, 1, T, C) * s
    mask = (rows < T)[:, None] & (cols < C)[None, :]
    offs = (batch + rows[:, None]) * C + cols[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def gated_short_conv(p, w):
    """p: (B, T, 3 C), the thirds b, c and x; w: (C, K), its last tap for the step itself; gives (B, T, C)."""
    p, w = p.contiguous(), w.contiguous()
    (B, T, C3), (C, K) = p.shape, w.shape
    if C3 != 3 * C:
        raise ValueError(f"a projection of {C3} is not three times {C} channels")
    if K > 8:
        raise ValueError(f"{K} taps are too many to be unrolled")
    y = torch.empty((B, T, C), device=p.device, dtype=p.dtype)
    grid = (triton.cdiv(T, BLOCKS["BLOCK_T"]), triton.cdiv(C, BLOCKS["BLOCK_C"]), B)
    gated_conv_kernel[grid](p, w, y, T, C, K, **BLOCKS)
    return y


def reference(p, w):
    b, c, x = p.chunk(3, dim=-1)
    K = w.shape[1]
    u = torch.nn.functional.pad(b * x, (0, 0, K - 1, 0))
    return c * sum(w[:, K - 1 - j] * u[:, K - 1 - j : u.shape[1] - j] for j in range(K))


SWEEP = [{"B": 8, "T": 4096, "C": 2048, "K": 3}, {"B": 3, "T": 2039, "C": 1000, "K": 4}]
SWEEP_CPU = [{"B": 2, "T": 45, "C": 70, "K": 3}, {"B": 1, "T": 33, "C": 9, "K": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, C, K = (dims[name] for name in ("B", "T", "C", "K"))
    p = torch.randn(B, T, 3 * C, device=device, dtype=dtype)
    return p, torch.randn(C, K, device=device, dtype=dtype) / max(1, K) ** 0.5


# ---- backward ----


@triton.jit
def gated_conv_backward_kernel(
    p_ptr, w_ptr, dy_ptr, dp_ptr, part_ptr, T, C,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = tl.program_id(2).to(tl.int64) * T
    p_ptr += batch * 3 * C
    dp_ptr += batch * 3 * C
    dy_ptr += batch * C
    slot = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * C * K
    in_tile = (rows < T)[:, None] & (cols < C)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * C + cols[None, :], mask=in_tile, other=0.0).to(tl.float32)
    e = dy * load_third(p_ptr, rows, cols, 1, T, C)
    s = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    du = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for j in tl.static_range(K):
        w = load_tap(w_ptr, cols, j, C, K)
        u = load_third(p_ptr, rows - j, cols, 0, T, C) * load_third(p_ptr, rows - j, cols, 2, T, C)
        s += w[None, :] * u
        tl.store(part_ptr + slot + cols * K + K - 1 - j, tl.sum(e * u, axis=0), mask=cols < C)
        ahead = rows + j
        mask = (ahead < T)[:, None] & (cols < C)[None, :]
        dy_ahead = tl.load(dy_ptr + ahead[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        du += w[None, :] * dy_ahead * load_third(p_ptr, ahead, cols, 1, T, C)
    store_third(dp_ptr, du * load_third(p_ptr, rows, cols, 2, T, C), rows, cols, 0, T, C)
    store_third(dp_ptr, dy * s, rows, cols, 1, T, C)
    store_third(dp_ptr, du * load_third(p_ptr, rows, cols, 0, T, C), rows, cols, 2, T, C)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s < slots)[:, None] & (i < size)[None, :]
        acc += tl.load(slots_ptr + s[:, None].to(tl.int64) * size + i[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + i, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=i < size)


class GatedShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, w):
        p, w = p.contiguous(), w.contiguous()
        ctx.save_for_backward(p, w)
        return gated_short_conv(p, w)

    @staticmethod
    def backward(ctx, dy):
        p, w = ctx.saved_tensors
        (B, T, _), (C, K) = p.shape, w.shape
        grid = (triton.cdiv(T, BLOCKS["BLOCK_T"]), triton.cdiv(C, BLOCKS["BLOCK_C"]), B)
        dp, dw = torch.empty_like(p), torch.empty_like(w)
        part = torch.empty((B * grid[0], C, K), device=p.device, dtype=torch.float32)
        gated_conv_backward_kernel[grid](p, w, dy.contiguous(), dp, part, T, C, K, **BLOCKS)
        needs = ctx.needs_input_grad
        if needs[1]:
            sum_slots_kernel[(triton.cdiv(C * K, 64),)](part, dw, B * grid[0], C * K, BLOCK_S=32, BLOCK=64)
        return dp if needs[0] else None, dw if needs[1] else None


def gated_short_conv_autograd(p, w):
    return GatedShortConv.apply(p, w)
