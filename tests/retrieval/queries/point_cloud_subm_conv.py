import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sparse_conv(
    feat,
    table,
    weight,
    out,
    N,
    CI,
    CO,
    TAPS: tl.constexpr,
    BN: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    acc = tl.zeros((BN, BO), tl.float32)
    for t in range(TAPS):
        nb = tl.load(table + n * TAPS + t, mask=n < N, other=-1)
        there = nb >= 0
        for c0 in range(0, CI, BI):
            c = c0 + tl.arange(0, BI)
            f = tl.load(
                feat + nb[:, None] * CI + c[None, :], mask=there[:, None] & (c < CI)[None, :], other=0.0
            )
            w = tl.load(
                weight + (t * CI + c)[:, None] * CO + o[None, :],
                mask=(c < CI)[:, None] & (o < CO)[None, :],
                other=0.0,
            )
            acc += tl.dot(f, w)
    tl.store(out + n[:, None] * CO + o[None, :], acc, mask=(n < N)[:, None] & (o < CO)[None, :])


@autodiff(inputs_require_grad=(0, 2))
def subm_conv(feat, table, weight):
    TAPS, CI, CO = weight.shape
    out = feat.new_empty(feat.shape[0], CO)
    sparse_conv[(triton.cdiv(feat.shape[0], 32), triton.cdiv(CO, 32))](
        feat, table, weight, out, feat.shape[0], CI, CO, TAPS, 32, 32, 32
    )
    return out
