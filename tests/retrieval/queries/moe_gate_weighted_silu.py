import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def weighted_act_kernel(h_ptr, score_ptr, o_ptr, T, I, sh, so, BT: tl.constexpr, BI: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    alive = t < T
    score = tl.load(score_ptr + t, mask=alive, other=0).to(tl.float32)
    for s in tl.range(0, I, BI):
        i = s + tl.arange(0, BI)
        msk = alive[:, None] & (i < I)[None, :]
        g = tl.load(h_ptr + t[:, None] * sh + i[None, :], mask=msk, other=0).to(tl.float32)
        u = tl.load(h_ptr + t[:, None] * sh + I + i[None, :], mask=msk, other=0).to(tl.float32)
        o = g * tl.sigmoid(g) * u * score[:, None]
        tl.store(o_ptr + t[:, None] * so + i[None, :], o.to(o_ptr.dtype.element_ty), mask=msk)


@autodiff(inputs_require_grad=(0, 1))
def expert_activation(h, score):
    """h (T, 2 I): gate and up side by side; score (T,): the router's weight of the token."""
    T, I = h.shape[0], h.shape[1] // 2
    o = torch.empty((T, I), dtype=h.dtype, device=h.device)
    weighted_act_kernel[(triton.cdiv(T, 8),)](h, score, o, T, I, h.stride(0), o.stride(0), BT=8, BI=128)
    return o
