import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.autotune(
    [triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}), triton.Config({"BLOCK_M": 128, "BLOCK_N": 64})], ["C_OUT"]
)
@triton.jit
def strided_conv(
    img,
    ker,
    bias,
    res,
    B,
    C_IN,
    Hh,
    Ww,
    C_OUT,
    Ho,
    Wo,
    K: tl.constexpr,
    ST: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pix = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    och = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = pix // (Ho * Wo)
    y = (pix % (Ho * Wo)) // Wo
    x = pix % Wo
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    KK: tl.constexpr = K * K
    for q in range(C_IN * KK):
        c = q // KK
        yy = y * ST + (q % KK) // K - PADDING
        xx = x * ST + q % K - PADDING
        ok = (n < B) & (yy >= 0) & (yy < Hh) & (xx >= 0) & (xx < Ww)
        v = tl.load(img + ((n * C_IN + c) * Hh + yy) * Ww + xx, mask=ok, other=0.0)
        k = tl.load(ker + och * C_IN * KK + q, mask=och < C_OUT, other=0.0)
        total += v[:, None] * k[None, :]
    total += tl.load(bias + och, mask=och < C_OUT, other=0.0)[None, :]
    dst = res + ((n[:, None] * C_OUT + och[None, :]) * Ho + y[:, None]) * Wo + x[:, None]
    tl.store(dst, total, mask=(n < B)[:, None] & (och < C_OUT)[None, :])


@autodiff(inputs_require_grad=(0, 1, 2))
def conv(img, ker, bias, stride=2, padding=1):
    B, C, H, W = img.shape
    O, _, K, _ = ker.shape
    Ho, Wo = (H + 2 * padding - K) // stride + 1, (W + 2 * padding - K) // stride + 1
    res = img.new_empty(B, O, Ho, Wo)
    grid = lambda m: (triton.cdiv(B * Ho * Wo, m["BLOCK_M"]), triton.cdiv(O, m["BLOCK_N"]))
    strided_conv[grid](img, ker, bias, res, B, C, H, W, O, Ho, Wo, K, stride, padding)
    return res
