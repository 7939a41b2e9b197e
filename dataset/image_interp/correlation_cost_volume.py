"""Correlation of two feature maps over a window of displacements: the cost volume of optical flow and stereo.

Forward    y[n, k, p] = (1 / C) sum_c f1[n, c, p] f2[n, c, p + d_k],  d_k over (2 r + 1)^2 displacements,
           f2 zero outside
Backward   df1[n, c, p] = (1 / C) sum_k dy[n, k, p] f2[n, c, p + d_k];
           df2[n, c, p] = (1 / C) sum_k dy[n, k, p - d_k] f1[n, c, p - d_k], the terms with p - d_k inside

Forward schedule: a program owns (sample, displacement, tile of pixels) and walks the channels.
Backward schedule: the displacement, an output axis before, is now summed, and the channels are what remains:
a program owns (sample, tile of channels, tile of pixels) and walks the displacements. df1 reads dy where it
stands and f2 shifted; df2 reads both dy and f1 shifted the other way, which turns what a forward program
would scatter into a gather: p - d_k is the one pixel that saw p at displacement k. So one kernel serves both,
with the sign of the shift and where dy is read as its only difference. The values of dy of a displacement
are loaded once for a tile of channels; nothing is added by atomics or zeroed before.

op: correlation
schedule: gather_transpose, swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def shifted(p, k, sign, r, H, W):
    """Pixel p moved by sign times displacement k, and whether it is still inside."""
    i = p // W + sign * (k // (2 * r + 1) - r)
    j = p % W + sign * (k % (2 * r + 1) - r)
    return i * W + j, (p < H * W) & (i >= 0) & (i < H) & (j >= 0) & (j < W)


@triton.jit
def correlation_kernel(
    f1_ptr, f2_ptr, y_ptr, C, H, W, r, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    P = H * W
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    there, inside = shifted(p, k, 1, r, H, W)
    total = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (c[:, None] < C) & inside[None, :]
        row = (n * C + c[:, None]) * P
        f1 = tl.load(f1_ptr + row + p[None, :], mask=mask, other=0.0).to(tl.float32)
        total += f1 * tl.load(f2_ptr + row + there[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(total, axis=0) / C
    tl.store(y_ptr + (n * tl.num_programs(1) + k) * P + p, y.to(y_ptr.dtype.element_ty), mask=p < P)


@autodiff(inputs_require_grad=(0, 1))
def correlation(f1, f2, r):
    """f1, f2: (N, C, H, W); gives (N, (2 r + 1)^2, H, W), rows of displacements first."""
    if f1.shape != f2.shape:
        raise ValueError("f1 and f2 must have one shape")
    f1, f2 = f1.contiguous(), f2.contiguous()
    N, C, H, W = f1.shape
    K = (2 * r + 1) ** 2
    y = torch.empty((N, K, H, W), device=f1.device, dtype=f1.dtype)
    correlation_kernel[(N, K, triton.cdiv(H * W, 128))](f1, f2, y, C, H, W, r, BLOCK_C=16, BLOCK_P=128)
    return y


def reference(f1, f2, r):
    H, W = f1.shape[2:]
    padded = torch.nn.functional.pad(f2, (r, r, r, r))
    side = range(2 * r + 1)
    return torch.stack([(f1 * padded[:, :, i : i + H, j : j + W]).mean(1) for i in side for j in side], dim=1)


SWEEP = [
    {"N": 4, "C": 128, "H": 64, "W": 128, "r": 4},
    {"N": 2, "C": 97, "H": 55, "W": 130, "r": 3},
]
SWEEP_CPU = [{"N": 1, "C": 5, "H": 6, "W": 7, "r": 2}, {"N": 2, "C": 20, "H": 9, "W": 16, "r": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["N"], dims["C"], dims["H"], dims["W"])
    f1, f2 = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return f1, f2, dims["r"]


# ---- backward ----


@triton.jit
def correlation_backward_kernel(
    other_ptr, dy_ptr, df_ptr, C, H, W, r, K,
    SECOND: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    P = H * W
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = (n * C + c[:, None]) * P
    df = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for k in range(K):
        there, inside = shifted(p, k, -1 if SECOND else 1, r, H, W)
        seen = there if SECOND else p  # the pixel of the output
        dy = tl.load(dy_ptr + (n * K + k) * P + seen, mask=inside, other=0.0).to(tl.float32)
        mask = (c[:, None] < C) & inside[None, :]
        other = tl.load(other_ptr + row + there[None, :], mask=mask, other=0.0).to(tl.float32)
        df += dy[None, :] * other
    mask = (c[:, None] < C) & (p[None, :] < P)
    tl.store(df_ptr + row + p[None, :], (df / C).to(df_ptr.dtype.element_ty), mask=mask)


class Correlation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f1, f2, r):
        f1, f2 = f1.contiguous(), f2.contiguous()
        ctx.save_for_backward(f1, f2)
        ctx.r = r
        return correlation(f1, f2, r)

    @staticmethod
    def backward(ctx, dy):
        f1, f2 = ctx.saved_tensors
        dy = dy.contiguous()
        (N, C, H, W), K = f1.shape, dy.shape[1]
        tiles = {"BLOCK_C": 16, "BLOCK_P": 128}
        grid = (N, triton.cdiv(C, 16), triton.cdiv(H * W, 128))
        df1 = df2 = None
        if ctx.needs_input_grad[0]:
            df1 = torch.empty_like(f1)
            correlation_backward_kernel[grid](f2, dy, df1, C, H, W, ctx.r, K, SECOND=False, **tiles)
        if ctx.needs_input_grad[1]:
            df2 = torch.empty_like(f2)
            correlation_backward_kernel[grid](f1, dy, df2, C, H, W, ctx.r, K, SECOND=True, **tiles)
        return df1, df2, None


def correlation_autograd(f1, f2, r):
    return Correlation.apply(f1, f2, r)
