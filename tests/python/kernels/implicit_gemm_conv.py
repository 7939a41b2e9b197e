"""2-D convolution as a matrix product whose rows are gathered patches; autotuned."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 1, "C": 3, "O": 5, "H": 6, "W": 6}]


@triton.autotune([triton.Config({"BK": 16}), triton.Config({"BK": 32})], key=["kk"])
@triton.jit
def gemm_conv_kernel(
    x_ptr, w_ptr, y_ptr, rows_total, o, kk, c, h, wd, oh, ow,
    KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    batch = row // (oh * ow)
    oy = row % (oh * ow) // ow
    ox = row % ow
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, kk, BK):
        inner = start + tl.arange(0, BK)
        ci = inner // (KH * KW)
        i = inner % (KH * KW) // KW
        j = inner % KW
        at = (
            ((batch[:, None] * c + ci[None, :]) * h + oy[:, None] + i[None, :]) * wd
            + ox[:, None]
            + j[None, :]
        )
        x = tl.load(x_ptr + at, mask=(row[:, None] < rows_total) & (inner[None, :] < kk), other=0.0)
        w = tl.load(
            w_ptr + col[None, :] * kk + inner[:, None],
            mask=(col[None, :] < o) & (inner[:, None] < kk),
            other=0.0,
        )
        acc += tl.dot(x, w, input_precision="ieee")
    to = (batch[:, None] * o + col[None, :]) * oh * ow + (row % (oh * ow))[:, None]
    tl.store(y_ptr + to, acc, mask=(row[:, None] < rows_total) & (col[None, :] < o))


@autodiff(inputs_require_grad=(0, 1))
def gemm_conv(x, w):
    b, c, h, wd = x.shape
    o, _, kh, kw = w.shape
    oh, ow = h - kh + 1, wd - kw + 1
    y = torch.empty((b, o, oh, ow), device=x.device, dtype=x.dtype)
    rows = b * oh * ow
    grid = (triton.cdiv(rows, 16), triton.cdiv(o, 16))
    gemm_conv_kernel[grid](x, w, y, rows, o, c * kh * kw, c, h, wd, oh, ow, KH=kh, KW=kw, BM=16, BN=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return x, torch.randn(dims["O"], dims["C"], 3, 3, device=device, dtype=dtype)


def reference(x, w):
    return torch.nn.functional.conv2d(x, w)
