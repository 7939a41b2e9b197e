import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def seq_softmax(x, off, y, H, BT: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    lo = tl.load(off + b)
    n = tl.load(off + b + 1) - lo
    m = -float("inf")
    z = 0.0
    for s in range(0, n, BT):
        t = s + tl.arange(0, BT)
        v = tl.load(x + (lo + t) * H + h, mask=t < n, other=-float("inf"))
        mn = tl.maximum(m, tl.max(v, 0))
        z = z * tl.exp(m - mn) + tl.sum(tl.exp(v - mn), 0)
        m = mn
    for s in range(0, n, BT):
        t = s + tl.arange(0, BT)
        v = tl.load(x + (lo + t) * H + h, mask=t < n, other=-float("inf"))
        tl.store(y + (lo + t) * H + h, tl.exp(v - m) / z, mask=t < n)


@autodiff(inputs_require_grad=(0,))
def jagged_softmax(x, off):
    y = torch.empty_like(x)
    seq_softmax[(off.numel() - 1, x.shape[1])](x, off, y, x.shape[1], BT=128)
    return y
