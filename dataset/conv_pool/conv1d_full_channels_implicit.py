"""1D convolution over all channels with stride and bias, time last: the stem of a speech encoder.

Forward    y[n, k, o] = b_k + sum over taps r and channels c of w[k, c, r] x[n, c, S o + r - pad],  0 outside
Backward   dx[n, c, i] = sum over the k, and the taps r with S o = i + pad - r for an output o, of
           w[k, c, r] dy[n, k, o];   db_k = sum over n and o of dy[n, k, o];
           dw[k, c, r] = sum over n and o of dy[n, k, o] x[n, c, S o + r - pad]

Forward schedule: a program owns (sequence, tile of k, tile of times) and walks taps and channels. Times lie
side by side, so x is loaded as channels by times, and w stands on the left.
Backward schedule: dx's owner is a tile of input times: for each tap one division says which output saw it, if
any; with stride S, all but one in S lanes of a tap are masked, which a stem with S of 1 or 2 can afford. w[k,
c, r] has R K C numbers and N T terms each: a program owns (tap and slot, tile of k by c) and walks the
sequences slot, slot + G, ..., both factors loaded along time. What it loads of dy is all that db needs: the
programs of the first tap and the first channels add the rows up on the way. A second kernel adds the slots of
both.

op: conv1d
schedule: gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_times(ptr, c, t, inside, C, T):
    mask = (c[:, None] < C) & inside[None, :]
    return tl.load(ptr + c[:, None].to(tl.int64) * T + t[None, :], mask=mask, other=0.0)


@triton.jit
def load_weights(w_ptr, k, c, r, K, C, R):
    mask = (k[:, None] < K) & (c[None, :] < C)
    return tl.load(w_ptr + (k[:, None] * C + c[None, :]) * R + r, mask=mask, other=0.0)


@triton.jit
def store_times(ptr, value, c, t, C, T):
    mask = (c[:, None] < C) & (t[None, :] < T)
    offs = c[:, None].to(tl.int64) * T + t[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv1d_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, C, K, T, OT, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for r in range(R):
        t = o * stride + r - pad
        inside = (o < OT) & (t >= 0) & (t < T)
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = load_times(x_ptr + n * C * T, c, t, inside, C, T)
            y = tl.dot(load_weights(w_ptr, k, c, r, K, C, R), x, y, input_precision=PRECISION)
    y += tl.load(b_ptr + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    store_times(y_ptr + n * K * OT, y, k, o, K, OT)


@autodiff(inputs_require_grad=(0, 1, 2))
def conv1d(x, w, b, stride=1):
    """x: (N, C, T); w: (K, C, R), padded by R // 2 on both sides; b: (K); gives (N, K, ..)."""
    (N, C, T), (K, E, R) = x.shape, w.shape
    OT = (T + 2 * (R // 2) - R) // stride + 1
    if E != C or b.shape != (K,) or OT < 1:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    y, tiles = torch.empty((N, K, OT), device=x.device, dtype=x.dtype), tiles_of(x)
    grid = (N, triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(OT, tiles["BLOCK"]))
    conv1d_kernel[grid](
        x.contiguous(), w.contiguous(), b.contiguous(), y, C, K, T, OT, R, stride, R // 2, **tiles
    )
    return y


def reference(x, w, b, stride=1):
    return torch.nn.functional.conv1d(x, w, b, stride=stride, padding=w.shape[2] // 2)


SWEEP = [
    {"N": 16, "C": 80, "K": 512, "T": 3000, "R": 3, "s": 1},
    {"N": 9, "C": 200, "K": 130, "T": 1501, "R": 3, "s": 2},
]
SWEEP_CPU = [
    {"N": 3, "C": 16, "K": 20, "T": 30, "R": 5, "s": 1},
    {"N": 1, "C": 35, "K": 9, "T": 41, "R": 3, "s": 2},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, K, T, R = (dims[name] for name in "NCKTR")
    R = max(1, min(R, T))
    x = torch.randn(N, C, T, device=device, dtype=dtype)
    w = torch.randn(K, C, R, device=device, dtype=dtype) / max(1, C * R) ** 0.5
    return (x, w, torch.randn(K, device=device, dtype=dtype)), {"stride": max(1, dims["s"])}


# ---- backward ----

MAX_SLOTS = 16


@triton.jit
def dx_kernel(
    dy_ptr, w_ptr, dx_ptr, C, K, T, OT, R, stride, pad, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for r in range(R):
        at = i + pad - r
        o = at // stride
        saw = (i < T) & (at >= 0) & (o * stride == at) & (o < OT)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            dy = load_times(dy_ptr + n * K * OT, k, o, saw, K, OT)
            w = load_weights(w_ptr, k, c, r, K, C, R)
            dx = tl.dot(tl.trans(w), dy, dx, input_precision=PRECISION)
    store_times(dx_ptr + n * C * T, dx, c, i, C, T)


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, dw_part_ptr, db_part_ptr, N, slots, C, K, T, OT, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r, slot = tl.program_id(0) // slots, (tl.program_id(0) % slots).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for n in range(slot, N, slots):
        for start in range(0, OT, BLOCK):
            o = start + tl.arange(0, BLOCK)
            t = o * stride + r - pad
            dy = load_times(dy_ptr + n * K * OT, k, o, o < OT, K, OT)
            x = load_times(x_ptr + n * C * T, c, t, (o < OT) & (t >= 0) & (t < T), C, T)
            dw = tl.dot(dy, tl.trans(x), dw, input_precision=PRECISION)
            db += dy.to(tl.float32)
    mask = (k[:, None] < K) & (c[None, :] < C)
    tl.store(dw_part_ptr + ((slot * K + k[:, None]) * C + c[None, :]) * R + r, dw, mask=mask)
    if (r == 0) & (tl.program_id(2) == 0):
        tl.store(db_part_ptr + slot * K + k, tl.sum(db, axis=1), mask=k < K)


@triton.jit
def add_slots_kernel(part_ptr, out_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=at < n)


def add_slots(part, dtype):
    out = torch.empty(part.shape[1:], device=part.device, dtype=dtype)
    n = out.numel()
    add_slots_kernel[(triton.cdiv(n, 256),)](part, out, n, part.shape[0], BLOCK=256)
    return out


class Conv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, stride):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.b_dtype = stride, b.dtype
        return conv1d(x, w, b, stride)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (N, C, T), (K, _, R), dy = x.shape, w.shape, dy.contiguous()
        sizes, tiles = (C, K, T, dy.shape[2], R, ctx.stride, R // 2), tiles_of(x)
        BLOCK, needs = tiles["BLOCK"], ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(N, triton.cdiv(C, BLOCK), triton.cdiv(T, BLOCK))](dy, w, dx, *sizes, **tiles)
        if needs[1] or needs[2]:
            slots = min(N, MAX_SLOTS)
            dw_part = torch.empty((slots, K, C, R), device=x.device, dtype=torch.float32)
            db_part = torch.empty((slots, K), device=x.device, dtype=torch.float32)
            grid = (R * slots, triton.cdiv(K, BLOCK), max(1, triton.cdiv(C, BLOCK)))
            weight_parts_kernel[grid](x, dy, dw_part, db_part, N, slots, *sizes, **tiles)
            dw = add_slots(dw_part, w.dtype) if needs[1] else None
            db = add_slots(db_part, ctx.b_dtype) if needs[2] else None
        return dx, dw, db, None


def conv1d_autograd(x, w, b, stride=1):
    return Conv1d.apply(x, w, b, stride)
