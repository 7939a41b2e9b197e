"""Pooling of packed sequences by a kernel that walks each sequence, with a learned weight, no chunk table."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def pool_kernel(x, w, cu, out, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    n, i_d = tl.program_id(0), tl.program_id(1)
    bos, eos = tl.load(cu + n), tl.load(cu + n + 1)
    d = i_d * BD + tl.arange(0, BD)
    acc = tl.zeros([BD], dtype=tl.float32)
    for t in range(bos, eos, BT):
        rows = t + tl.arange(0, BT)
        m = (rows < eos)[:, None] & (d < D)[None, :]
        b = tl.load(x + rows[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        acc += tl.sum(tl.exp(b) * b, axis=0)
    acc *= tl.load(w + d, mask=d < D, other=0.0)
    tl.store(out + n * D + d, acc / tl.maximum(eos - bos, 1), mask=d < D)


@autodiff(inputs_require_grad=(0, 1))
def pool(x, w, cu):
    N, D = cu.numel() - 1, x.shape[1]
    out = x.new_empty(N, D)
    pool_kernel[(N, triton.cdiv(D, 16))](x, w, cu, out, D=D, BD=16, BT=8)
    return out


SWEEP = [{"T": 29, "D": 20}, {"T": 16, "D": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    cu = torch.tensor([0, T // 3, T // 3, T], dtype=torch.int32, device=device)
    return (
        torch.randn(T, dims["D"], device=device, dtype=dtype),
        torch.rand(dims["D"], device=device, dtype=dtype),
        cu,
    )
