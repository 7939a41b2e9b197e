import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sparse_layout_attention(Q, K, V, O, row_start, col_list, T, scale, D: tl.constexpr, TILE: tl.constexpr):
    qt, bh = tl.program_id(0), tl.program_id(1)
    ids = tl.arange(0, TILE)
    d = tl.arange(0, D)
    plane = bh * T * D
    q = tl.load(Q + plane + (qt * TILE + ids)[:, None] * D + d[None, :])
    m = tl.full((TILE,), float("-inf"), tl.float32)
    l = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, D), tl.float32)
    lo = tl.load(row_start + qt)
    hi = tl.load(row_start + qt + 1)
    for e in range(lo, hi):
        kt = tl.load(col_list + e)
        rows = kt * TILE + ids
        k = tl.load(K + plane + rows[:, None] * D + d[None, :])
        v = tl.load(V + plane + rows[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale
        mm = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - mm[:, None])
        corr = tl.exp(m - mm)
        acc = acc * corr[:, None] + tl.dot(p.to(v.dtype), v)
        l = l * corr + tl.sum(p, 1)
        m = mm
    tl.store(O + plane + (qt * TILE + ids)[:, None] * D + d[None, :], acc / l[:, None])


@autodiff(inputs_require_grad=(0, 1, 2))
def blocksparse_attention(q, k, v, row_start, col_list):
    BH, T, D = q.shape
    o = torch.empty_like(q)
    sparse_layout_attention[(T // 64, BH)](q, k, v, o, row_start, col_list, T, D**-0.5, D=D, TILE=64)
    return o
