import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def dispatch(tokens, order, out, H, TOPK: tl.constexpr, BH: tl.constexpr):
    dst = tl.program_id(0)
    src = tl.load(order + dst) // TOPK
    for s in range(0, H, BH):
        h = s + tl.arange(0, BH)
        v = tl.load(tokens + src * H + h, mask=h < H)
        tl.store(out + dst * H + h, v, mask=h < H)


@autodiff(inputs_require_grad=(0,))
def permute(tokens, order, topk=2):
    H = tokens.shape[1]
    out = tokens.new_empty(order.numel(), H)
    dispatch[(order.numel(),)](tokens, order, out, H, TOPK=topk, BH=512)
    return out
