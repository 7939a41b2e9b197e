"""Depthwise 2D convolution, channels last, with large windows, as in ConvNeXt.

Forward    y[p, c] = sum over taps r of x[p + r - pad, c] w[r, c],  R odd, pad = (R - 1) / 2, stride 1
Backward   dx[i, c] = sum over r of dy[i - r + pad, c] w[r, c]: with r' = R - 1 - r a coordinate, and as
           R - 1 = 2 pad, that is sum over r' of dy[i + r' - pad, c] w[R - 1 - r', c];
           dw[r, c] = sum over p of x[p + r - pad, c] dy[p, c]

Forward schedule: a program owns (run of pixels, tile of channels) and walks the taps; each channel has a
filter of its own, so there is nothing for a dot.
Backward schedule: dx is the forward of dy with the taps in reversed order, and so the same kernel, told to
count taps from the end. dw has R^2 C numbers and a sum over all pixels: owners of taps would each read all of
x and dy from memory, 49 times for a window of 7. Here a program owns a run of pixels, a few rows of a
picture, and a tile of channels. It is so little of x and dy that all taps find it in the L1 cache; the
program walks it once for each tap, stores R^2 rows in its slot, and a second kernel adds the slots in order.

op: depthwise_conv2d
schedule: gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_P": 32, "BLOCK_C": 32}
RUN = 512  # pixels of a slot


@triton.jit
def window_tile(x_ptr, p, tap, c, pixels, Y, X, C, R):
    """The tile of x that tap reads for pixels p and channels c, in float32; zeros outside the picture."""
    y, x = p // X % Y + tap // R - R // 2, p % X + tap % R - R // 2
    inside = (p < pixels) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
    offs = ((p // (Y * X) * Y + y) * X + x)[:, None] * C + c[None, :]
    return tl.load(x_ptr + offs, mask=inside[:, None] & (c[None, :] < C), other=0.0).to(tl.float32)


@triton.jit
def depthwise_kernel(
    x_ptr, w_ptr, y_ptr, pixels, Y, X, C, R, REVERSED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for tap in range(R * R):
        w_row = R * R - 1 - tap if REVERSED else tap
        w = tl.load(w_ptr + w_row * C + c, mask=c < C, other=0.0).to(tl.float32)
        y += window_tile(x_ptr, p, tap, c, pixels, Y, X, C, R) * w[None, :]
    mask = (p[:, None] < pixels) & (c[None, :] < C)
    tl.store(y_ptr + p[:, None] * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def depthwise(x, w, REVERSED):
    (N, Y, X, C), R = x.shape, w.shape[0]
    if R % 2 == 0 or w.shape != (R, R, C):
        raise ValueError(f"a window must be odd, square and of {C} channels, and w is {tuple(w.shape)}")
    y, pixels = torch.empty_like(x), N * Y * X
    grid = (triton.cdiv(pixels, BLOCKS["BLOCK_P"]), triton.cdiv(C, BLOCKS["BLOCK_C"]))
    depthwise_kernel[grid](x, w, y, pixels, Y, X, C, R, REVERSED=REVERSED, **BLOCKS)
    return y


@autodiff(inputs_require_grad=(0, 1))
def depthwise_conv2d(x, w):
    """x: (N, Y, X, C); w: (R, R, C), R odd; gives (N, Y, X, C)."""
    return depthwise(x.contiguous(), w.contiguous(), REVERSED=False)


def reference(x, w):
    R, C = w.shape[1:]
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(2, 0, 1)[:, None].contiguous()
    return torch.nn.functional.conv2d(x, w, padding=R // 2, groups=C).permute(0, 2, 3, 1)


SWEEP = [{"N": 64, "Y": 56, "X": 56, "C": 96, "R": 7}, {"N": 16, "Y": 113, "X": 97, "C": 130, "R": 5}]
SWEEP_CPU = [{"N": 1, "Y": 14, "X": 12, "C": 9, "R": 5}, {"N": 2, "Y": 17, "X": 19, "C": 40, "R": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, Y, X, C, R = (dims[key] for key in ("N", "Y", "X", "C", "R"))
    x = torch.randn(N, Y, X, C, device=device, dtype=dtype)
    return x, torch.randn(R, R, C, device=device, dtype=dtype) / max(1, R)


# ---- backward ----


@triton.jit
def weight_slot_kernel(
    x_ptr, dy_ptr, slots_ptr, pixels, Y, X, C, R, RUN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * RUN
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot_ptr = slots_ptr + tl.program_id(0).to(tl.int64) * R * R * C
    for tap in range(R * R):
        dw = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
        for start in range(0, RUN, BLOCK_P):
            p = first + start + tl.arange(0, BLOCK_P)
            mask = (p[:, None] < pixels) & (c[None, :] < C)
            dy = tl.load(dy_ptr + p[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
            dw += window_tile(x_ptr, p, tap, c, pixels, Y, X, C, R) * dy
        tl.store(slot_ptr + tap * C + c, tl.sum(dw, axis=0), mask=c < C)


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, slots, size, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        mask = (s[:, None] < slots) & (i[None, :] < size)
        dw += tl.load(slots_ptr + s[:, None] * size + i[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + i, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=i < size)


class DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return depthwise(x, w, REVERSED=False)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        (N, Y, X, C), R = x.shape, w.shape[0]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = depthwise(dy, w, REVERSED=True)
        if ctx.needs_input_grad[1]:
            pixels, size = N * Y * X, w.numel()
            count = triton.cdiv(pixels, RUN)
            slots = torch.empty((count, size), device=x.device, dtype=torch.float32)
            grid = (count, triton.cdiv(C, BLOCKS["BLOCK_C"]))
            weight_slot_kernel[grid](x, dy, slots, pixels, Y, X, C, R, RUN=RUN, **BLOCKS)
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(size, 64),)](slots, dw, count, size, BLOCK_S=16, BLOCK=64)
        return dx, dw


def depthwise_conv2d_autograd(x, w):
    return DepthwiseConv2d.apply(x, w)
