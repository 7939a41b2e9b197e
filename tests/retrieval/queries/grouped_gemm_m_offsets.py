import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def grouped(
    x, w, y, ends, E, N, K, NUM_SM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    tile = tl.program_id(0)
    done = 0
    start = 0
    for e in range(E):
        end = tl.load(ends + e)
        nt = tl.cdiv(N, BN)
        count = tl.cdiv(end - start, BM) * nt
        while tile >= done and tile < done + count:
            local = tile - done
            m = start + local // nt * BM + tl.arange(0, BM)
            n = local % nt * BN + tl.arange(0, BN)
            acc = tl.zeros((BM, BN), tl.float32)
            for k0 in range(0, K, BK):
                k = k0 + tl.arange(0, BK)
                a = tl.load(
                    x + m[:, None] * K + k[None, :], mask=(m < end)[:, None] & (k < K)[None, :], other=0.0
                )
                b = tl.load(
                    w + e * K * N + k[:, None] * N + n[None, :],
                    mask=(k < K)[:, None] & (n < N)[None, :],
                    other=0.0,
                )
                acc += tl.dot(a, b)
            tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < end)[:, None] & (n < N)[None, :])
            tile += NUM_SM
        done += count
        start = end


@autodiff(inputs_require_grad=(0, 1))
def grouped_mm(x, w, ends):
    E, K, N = w.shape
    y = x.new_empty(x.shape[0], N)
    grouped[(132,)](x, w, y, ends, E, N, K, NUM_SM=132, BM=64, BN=64, BK=32)
    return y
