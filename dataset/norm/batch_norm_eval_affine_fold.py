"""Batch norm with frozen statistics, as when a network is tuned further: a scale and a shift a channel.

Forward    r_c = (var_c + eps)^(-1/2),   y = (x - mu_c) r_c w_c + b_c;   mu and var are given, not made from x
Backward   dx = dy r_c w_c,   db_c = sum dy,   dw_c = sum dy (x - mu_c) r_c,   the sums over images and pixels

Forward schedule: tiles of the planes (image, channel), flat. Nothing is reduced; the four numbers of a
channel are folded into one scale and one shift before they meet x.
Backward schedule: no mean couples the pixels, so dx is a product and could keep the forward's tiles. What
decides is dw and db, sums over everything but the channel. A program owns a channel and a strided set of
images: in one walk it writes dx and adds both sums, dw's as dy (x - mu), with r once at the end; x and dy are
read once for all three. Its sums go to slots, (part, channel), and a second kernel adds the parts. If x needs
no gradient its store falls away at compile time, and if only x does, so do x's load and the sums.

op: batch_norm_eval
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(P):
    return min(1024, max(16, triton.next_power_of_2(P)))


@triton.jit
def load_channel(ptr, c):
    return tl.load(ptr + c).to(tl.float32)


@triton.jit
def frozen_norm_kernel(x_ptr, mu_ptr, var_ptr, w_ptr, b_ptr, y_ptr, C, P, eps, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    c = tl.program_id(0) % C
    scale = tl.rsqrt(load_channel(var_ptr, c) + eps) * load_channel(w_ptr, c)
    shift = load_channel(b_ptr, c) - load_channel(mu_ptr, c) * scale
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + plane * P + i, mask=i < P, other=0.0).to(tl.float32)
        tl.store(y_ptr + plane * P + i, (x * scale + shift).to(y_ptr.dtype.element_ty), mask=i < P)


@autodiff(inputs_require_grad=(0, 3, 4))
def frozen_batch_norm(x, mu, var, w, b, eps=1e-5):
    """x: (N, C, P), P pixels; mu, var, w, b: (C)."""
    N, C, P = x.shape
    if any(t.shape != (C,) for t in (mu, var, w, b)):
        raise ValueError(f"x {tuple(x.shape)}, mu {tuple(mu.shape)} and w {tuple(w.shape)} do not fit")
    x, mu, var, w, b = (t.contiguous() for t in (x, mu, var, w, b))
    y = torch.empty_like(x)
    frozen_norm_kernel[(N * C,)](x, mu, var, w, b, y, C, P, eps, BLOCK=tile_of(P))
    return y


def reference(x, mu, var, w, b, eps=1e-5):
    return (x - mu[:, None]) * (torch.rsqrt(var + eps) * w)[:, None] + b[:, None]


SWEEP = [{"N": 64, "C": 256, "P": 3136}, {"N": 61, "C": 2048, "P": 49}]
SWEEP_CPU = [{"N": 5, "C": 7, "P": 33}, {"N": 40, "C": 3, "P": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = 0.5 + 2 * torch.randn(dims["N"], C, dims["P"], device=device, dtype=dtype)
    mu, w, b = (torch.randn(C, device=device, dtype=dtype) for _ in range(3))
    return x, mu, 3 + torch.rand(C, device=device, dtype=dtype), 1 + 0.2 * w, b


# ---- backward ----

PARTS = 16  # of the images; with some hundred channels they fill a GPU


@triton.jit
def frozen_norm_backward_kernel(
    x_ptr, mu_ptr, var_ptr, w_ptr, dy_ptr, dx_ptr, dw_slots_ptr, db_slots_ptr, N, C, P, eps,
    WANT_X: tl.constexpr, WANT_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mu, r = load_channel(mu_ptr, c), tl.rsqrt(load_channel(var_ptr, c) + eps)
    scale = r * load_channel(w_ptr, c)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for image in range(part, N, tl.num_programs(1)):
        base = (image * C + c) * P
        for start in range(0, P, BLOCK):
            i = start + tl.arange(0, BLOCK)
            dy = tl.load(dy_ptr + base + i, mask=i < P, other=0.0).to(tl.float32)
            if WANT_X:
                tl.store(dx_ptr + base + i, (dy * scale).to(dx_ptr.dtype.element_ty), mask=i < P)
            if WANT_SUMS:
                x = tl.load(x_ptr + base + i, mask=i < P, other=0.0).to(tl.float32)
                dw += dy * (x - mu)
                db += dy
    if WANT_SUMS:
        tl.store(dw_slots_ptr + part * C + c, tl.sum(dw, axis=0) * r)
        tl.store(db_slots_ptr + part * C + c, tl.sum(db, axis=0))


@triton.jit
def sum_slots_kernel(dw_slots_ptr, db_slots_ptr, dw_ptr, db_ptr, C, parts, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(parts):
        dw += tl.load(dw_slots_ptr + part * C + c, mask=c < C, other=0.0)
        db += tl.load(db_slots_ptr + part * C + c, mask=c < C, other=0.0)
    tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty), mask=c < C)
    tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty), mask=c < C)


class FrozenBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mu, var, w, b, eps):
        x, mu, var, w = x.contiguous(), mu.contiguous(), var.contiguous(), w.contiguous()
        ctx.save_for_backward(x, mu, var, w)
        ctx.eps, ctx.b_dtype = eps, b.dtype
        return frozen_batch_norm(x, mu, var, w, b, eps)

    @staticmethod
    def backward(ctx, dy):
        x, mu, var, w = ctx.saved_tensors
        (N, C, P), needs = x.shape, ctx.needs_input_grad
        parts, want_sums = min(N, PARTS), needs[3] or needs[4]
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
        slots = torch.empty((2, parts, C), device=x.device, dtype=torch.float32)
        frozen_norm_backward_kernel[(C, parts)](
            x, mu, var, w, dy.contiguous(), dx, slots[0], slots[1], N, C, P, ctx.eps,
            WANT_X=needs[0], WANT_SUMS=want_sums, BLOCK=tile_of(P),
        )  # fmt: skip
        if want_sums:
            sum_slots_kernel[(triton.cdiv(C, 64),)](slots[0], slots[1], dw, db, C, parts, BLOCK=64)
        return dx if needs[0] else None, None, None, dw if needs[3] else None, db if needs[4] else None, None


def frozen_batch_norm_autograd(x, mu, var, w, b, eps=1e-5):
    return FrozenBatchNorm.apply(x, mu, var, w, b, eps)
