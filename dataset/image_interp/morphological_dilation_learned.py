"""Morphological dilation with a learned structuring element, max-plus in place of times-plus.

Forward    y[n, c, p] = max over taps t = (r, q) of x[n, c, p + (r, q) - pad] + w[c, t], the first of equal
           ones; R odd, pad = (R - 1) / 2; taps outside the image do not count
Backward   with t*(p) the tap that won at p:  dx[n, c, i] = sum over the taps t with t*(i - t + pad) = t of
           dy[n, c, i - t + pad];   dw[c, t] = sum over the n and p with t*(p) = t of dy[n, c, p]

Forward schedule: a program owns a tile of pixels of one plane, walks the taps, and saves which one won, a
byte a pixel.
Backward schedule: all that is left of the maximum is that byte, so neither x nor w is read again. The owner
of an input pixel asks the R R outputs that could have taken it whether they did: a comparison with the one
tap by which they see it, no atomics. The sum for w runs over all pixels of a channel but has only R R
destinations a channel: a program takes a tile of one plane and, tap by tap, reduces the dy whose byte is that
tap, R R numbers that it stores as its part; a second kernel adds the parts of a channel.

op: dilation2d
schedule: index_or_seed_replay, gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 512


@triton.jit
def moved(p, tap, R, H, W):
    """The pixel that a tap of p reads, and whether there is one."""
    i, j = p // W + tap // R - R // 2, p % W + tap % R - R // 2
    return i * W + j, (p < H * W) & (i >= 0) & (i < H) & (j >= 0) & (j < W)


@triton.jit
def dilation_kernel(x_ptr, w_ptr, y_ptr, winner_ptr, C, H, W, R, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    P = H * W
    best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    winner = tl.full([BLOCK], -1, dtype=tl.int32)
    for tap in range(R * R):
        q, inside = moved(p, tap, R, H, W)
        x = tl.load(x_ptr + plane * P + q, mask=inside, other=0.0).to(tl.float32)
        value = x + tl.load(w_ptr + plane % C * R * R + tap).to(tl.float32)
        wins = inside & ((value > best) | (winner < 0))
        best = tl.where(wins, value, best)
        winner = tl.where(wins, tap, winner)
    tl.store(y_ptr + plane * P + p, best.to(y_ptr.dtype.element_ty), mask=p < P)
    tl.store(winner_ptr + plane * P + p, winner.to(tl.int8), mask=p < P)


def dilation_forward(x, w):
    (N, C, H, W), R = x.shape, w.shape[1]
    if R % 2 == 0 or R > 11 or w.shape != (C, R, R):
        raise ValueError(f"w {tuple(w.shape)}: an odd side of at most 11 for each of {C} channels")
    y = torch.empty_like(x)
    winner = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    grid = (N * C, triton.cdiv(H * W, BLOCK))
    dilation_kernel[grid](x, w, y, winner, C, H, W, R, BLOCK=BLOCK)
    return y, winner


@autodiff(inputs_require_grad=(0, 1))
def dilation2d(x, w):
    """x: (N, C, H, W); w: (C, R, R), R odd."""
    return dilation_forward(x.contiguous(), w.contiguous())[0]


def reference(x, w):
    (H, W), R = x.shape[2:], w.shape[1]
    padded = torch.nn.functional.pad(x, 4 * (R // 2,), value=-float("inf"))
    y = torch.full_like(x, -float("inf"))
    for tap in range(R * R):
        r, q = tap // R, tap % R
        value = padded[:, :, r : r + H, q : q + W] + w[:, r, q, None, None]
        y = torch.where(value > y, value, y)
    return y


SWEEP = [
    {"N": 16, "C": 64, "H": 112, "W": 112, "R": 3},
    {"N": 3, "C": 19, "H": 255, "W": 301, "R": 5},
]
SWEEP_CPU = [{"N": 2, "C": 3, "H": 9, "W": 11, "R": 3}, {"N": 1, "C": 2, "H": 23, "W": 25, "R": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    R = dims["R"] + 1 - dims["R"] % 2
    x = torch.randn(dims["N"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return x, torch.randn(dims["C"], R, R, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def dx_kernel(winner_ptr, dy_ptr, dx_ptr, H, W, R, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    P = H * W
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        q, inside = moved(p, R * R - 1 - tap, R, H, W)  # the output whose tap reads p
        taken = tl.load(winner_ptr + plane * P + q, mask=inside, other=-1) == tap
        dx += tl.load(dy_ptr + plane * P + q, mask=inside & taken, other=0.0).to(tl.float32)
    tl.store(dx_ptr + plane * P + p, dx.to(dx_ptr.dtype.element_ty), mask=p < P)


@triton.jit
def weight_parts_kernel(winner_ptr, dy_ptr, part_ptr, P, TAPS, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    winner = tl.load(winner_ptr + plane * P + p, mask=p < P, other=-1)
    dy = tl.load(dy_ptr + plane * P + p, mask=p < P, other=0.0).to(tl.float32)
    part = part_ptr + (plane * tl.num_programs(1) + tl.program_id(1)) * TAPS
    for tap in range(TAPS):
        tl.store(part + tap, tl.sum(tl.where(winner == tap, dy, 0.0), axis=0))


@triton.jit
def weight_sum_kernel(part_ptr, dw_ptr, N, C, tiles, TAPS, BLOCK: tl.constexpr):
    """dw[c, tap] over the tiles of a channel's planes, N of them, C planes apart."""
    c, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N * tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        offs = (((i // tiles) * C + c) * tiles + i % tiles) * TAPS + tap
        acc += tl.load(part_ptr + offs, mask=i < N * tiles, other=0.0)
    tl.store(dw_ptr + c * TAPS + tap, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty))


class Dilation2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y, winner = dilation_forward(x.contiguous(), w.contiguous())
        ctx.save_for_backward(winner)
        ctx.w_shape, ctx.w_dtype = w.shape, w.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        (winner,) = ctx.saved_tensors
        (N, C, H, W), R, dy = winner.shape, ctx.w_shape[1], dy.contiguous()
        tiles = triton.cdiv(H * W, BLOCK)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(dy)
            dx_kernel[(N * C, tiles)](winner, dy, dx, H, W, R, BLOCK=BLOCK)
        if ctx.needs_input_grad[1]:
            dw = torch.empty(ctx.w_shape, device=dy.device, dtype=ctx.w_dtype)
            part = torch.empty((N * C * tiles, R * R), device=dy.device, dtype=torch.float32)
            weight_parts_kernel[(N * C, tiles)](winner, dy, part, H * W, R * R, BLOCK=BLOCK)
            weight_sum_kernel[(C, R * R)](part, dw, N, C, tiles, R * R, BLOCK=256)
        return dx, dw


def dilation2d_autograd(x, w):
    return Dilation2d.apply(x, w)
