"""Maximum pooling over windows that may overlap.

Forward    y_o = max of x_p over the pixels p inside the window of o; of equal pixels the first wins
Backward   dx_p = sum of dy_o over the windows o that p won

Forward schedule: a program owns a flat tile of outputs, and saves which of the k k offsets won, in one
byte.
Backward schedule: a pixel's owner enumerates the windows that contain it, at most ceil(k / s) along each
axis, compares the saved offset with its own offset in that window, and adds dy where they agree. A window
has one winner, a pixel may win several windows: the gather sums them without atomics, in a fixed order, and
stores every dx once.

op: max_pool2d
schedule: index_or_seed_replay, gather_transpose
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def max_pool_kernel(x_ptr, y_ptr, winner_ptr, n_out, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = o // (OY * OX)
    y0 = o // OX % OY * stride - pad
    x0 = o % OX * stride - pad
    best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    winner = tl.full([BLOCK], -1, dtype=tl.int32)
    for i in range(k):
        for j in range(k):
            y, x = y0 + i, x0 + j
            mask = (o < n_out) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
            value = tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=-float("inf")).to(tl.float32)
            wins = mask & ((value > best) | (winner < 0))
            best = tl.where(wins, value, best)
            winner = tl.where(wins, i * k + j, winner)
    tl.store(y_ptr + o, best, mask=o < n_out)
    tl.store(winner_ptr + o, winner.to(tl.int8), mask=o < n_out)


def max_pool2d_forward(x, k, stride):
    if k > 11:
        raise ValueError(f"an offset in a window of {k} x {k} does not fit a byte")
    N, C, Y, X = x.shape
    pad = k // 2
    OY, OX = (Y + 2 * pad - k) // stride + 1, (X + 2 * pad - k) // stride + 1
    y = torch.empty((N, C, OY, OX), device=x.device, dtype=x.dtype)
    winner = torch.empty((N, C, OY, OX), device=x.device, dtype=torch.int8)
    max_pool_kernel[(triton.cdiv(y.numel(), 128),)](
        x, y, winner, y.numel(), Y, X, OY, OX, k, stride, pad, BLOCK=128
    )
    return y, winner


@autodiff(inputs_require_grad=(0,))
def max_pool2d(x, k, stride):
    """x: (N, C, Y, X); square windows of side k, padded by k // 2."""
    return max_pool2d_forward(x.contiguous(), k, stride)[0]


def reference(x, k, stride):
    return torch.nn.functional.max_pool2d(x, k, stride, k // 2)


SWEEP = [
    {"N": 64, "C": 64, "Y": 112, "X": 112, "k": 3, "s": 2},
    {"N": 32, "C": 256, "Y": 56, "X": 56, "k": 2, "s": 2},
    {"N": 17, "C": 96, "Y": 97, "X": 61, "k": 3, "s": 1},
]
SWEEP_CPU = [
    {"N": 2, "C": 3, "Y": 11, "X": 13, "k": 3, "s": 2},
    {"N": 1, "C": 2, "Y": 6, "X": 9, "k": 2, "s": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["C"], dims["Y"], dims["X"], device=device, dtype=dtype)
    return x, dims["k"], dims["s"]


# ---- backward ----


@triton.jit
def max_pool_backward_kernel(
    dy_ptr, winner_ptr, dx_ptr, n_in, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr
):
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = p // (Y * X)
    y = p // X % Y
    x = p % X
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.cdiv(k, stride)):
        for j in range(tl.cdiv(k, stride)):
            oy, ox = (y + pad) // stride - i, (x + pad) // stride - j
            in_y, in_x = y - (oy * stride - pad), x - (ox * stride - pad)
            mask = (oy >= 0) & (oy < OY) & (in_y < k) & (ox >= 0) & (ox < OX) & (in_x < k) & (p < n_in)
            o = (plane * OY + oy) * OX + ox
            won = tl.load(winner_ptr + o, mask=mask, other=-1) == in_y * k + in_x
            acc += tl.load(dy_ptr + o, mask=mask & won, other=0.0).to(tl.float32)
    tl.store(dx_ptr + p, acc, mask=p < n_in)


class MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, stride):
        y, winner = max_pool2d_forward(x.contiguous(), k, stride)
        ctx.save_for_backward(winner)
        ctx.x_shape, ctx.k, ctx.stride = x.shape, k, stride
        return y

    @staticmethod
    def backward(ctx, dy):
        (winner,) = ctx.saved_tensors
        dy = dy.contiguous()
        Y, X = ctx.x_shape[2:]
        OY, OX = dy.shape[2:]
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        max_pool_backward_kernel[(triton.cdiv(dx.numel(), 128),)](
            dy, winner, dx, dx.numel(), Y, X, OY, OX, ctx.k, ctx.stride, ctx.k // 2, BLOCK=128
        )
        return dx, None, None


def max_pool2d_autograd(x, k, stride):
    return MaxPool2d.apply(x, k, stride)
