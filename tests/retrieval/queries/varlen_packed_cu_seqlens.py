import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def varlen_fwd(Q, K, V, O, cu, scale, st, sh, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    i, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bos = tl.load(cu + s).to(tl.int64)
    n = tl.load(cu + s + 1).to(tl.int64) - bos
    if i * BM >= n:
        return
    rm = i * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    q = tl.load(Q + (bos + rm)[:, None] * st + h * sh + rd, mask=(rm < n)[:, None], other=0.0)
    mi = tl.full([BM], float("-inf"), tl.float32)
    li = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, D], tl.float32)
    for j in range(0, tl.minimum(n, (i + 1) * BM), BN):
        rn = j + tl.arange(0, BN)
        k = tl.load(K + (bos + rn)[None, :] * st + h * sh + rd[:, None], mask=(rn < n)[None, :], other=0.0)
        v = tl.load(V + (bos + rn)[:, None] * st + h * sh + rd, mask=(rn < n)[:, None], other=0.0)
        s_ = tl.dot(q, k) * scale
        s_ = tl.where((rm[:, None] >= rn[None, :]) & (rn < n)[None, :], s_, float("-inf"))
        mn = tl.maximum(mi, tl.max(s_, 1))
        p = tl.exp2((s_ - mn[:, None]) * 1.4426950408889634)
        r = tl.exp2((mi - mn) * 1.4426950408889634)
        li = li * r + tl.sum(p, 1)
        o = o * r[:, None] + tl.dot(p.to(v.dtype), v)
        mi = mn
    tl.store(
        O + (bos + rm)[:, None] * st + h * sh + rd,
        (o / li[:, None]).to(O.dtype.element_ty),
        mask=(rm < n)[:, None],
    )


@autodiff(inputs_require_grad=(0, 1, 2))
def flash_varlen(q, k, v, cu_seqlens, max_len):
    total, H, D = q.shape
    o = torch.empty_like(q)
    grid = (triton.cdiv(max_len, 64), H, cu_seqlens.numel() - 1)
    varlen_fwd[grid](q, k, v, o, cu_seqlens, D**-0.5, q.stride(0), q.stride(1), D=D, BM=64, BN=64)
    return o
