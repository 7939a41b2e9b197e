import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gat_node(rowptr, col, al, ar, h, out, H, F, slope, BF: tl.constexpr):
    v, hd = tl.program_id(0), tl.program_id(1)
    f = tl.arange(0, BF)
    a = tl.load(ar + v * H + hd)
    m = -1e30
    s = 0.0
    acc = tl.zeros((BF,), tl.float32)
    for e in range(tl.load(rowptr + v), tl.load(rowptr + v + 1)):
        u = tl.load(col + e)
        z = tl.load(al + u * H + hd) + a
        z = tl.where(z > 0, z, z * slope)
        mn = tl.maximum(m, z)
        c = tl.exp(m - mn)
        p = tl.exp(z - mn)
        acc = acc * c + p * tl.load(h + (u * H + hd) * F + f, mask=f < F, other=0.0)
        s = s * c + p
        m = mn
    tl.store(out + (v * H + hd) * F + f, acc / (s + 1e-16), mask=f < F)


@autodiff(inputs_require_grad=(2, 3, 4))
def gat_conv(rowptr, col, al, ar, h, slope=0.2):
    N, H, F = h.shape
    out = torch.empty_like(h)
    gat_node[(N, H)](rowptr, col, al, ar, h, out, H, F, slope, BF=triton.next_power_of_2(F))
    return out
