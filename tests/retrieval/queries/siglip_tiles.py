import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def pair_logsigmoid(
    zi, zt, scale_p, bias_p, part, N, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    pm, pn = tl.program_id(0), tl.program_id(1)
    m = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        d = k + tl.arange(0, BK)
        a = tl.load(zi + m[:, None] * D + d[None, :], mask=(m < N)[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(zt + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.dot(a, tl.trans(b))
    l = acc * tl.load(scale_p) + tl.load(bias_p)
    l = tl.where(m[:, None] == n[None, :], l, -l)
    ls = tl.minimum(l, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(l)))
    ok = (m < N)[:, None] & (n < N)[None, :]
    tl.store(part + pm * tl.num_programs(1) + pn, -tl.sum(tl.sum(tl.where(ok, ls, 0.0), 1), 0))


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def siglip(zi, zt, scale, bias):
    N, D = zi.shape
    g = triton.cdiv(N, 32)
    part = torch.empty(g, g, device=zi.device)
    pair_logsigmoid[(g, g)](zi, zt, scale, bias, part, N, D, 32, 32, 32)
    return part.sum() / N
