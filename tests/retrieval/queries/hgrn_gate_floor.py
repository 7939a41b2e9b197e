import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def hgru(i_in, f_in, low, h_out, T, D, BD: tl.constexpr):
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    b = tl.program_id(1)
    m = d < D
    lb = tl.sigmoid(tl.load(low + d, mask=m, other=0.0))
    h = tl.zeros((BD,), tl.float32)
    for t in range(T):
        o = (b * T + t) * D + d
        f = lb + (1 - lb) * tl.sigmoid(tl.load(f_in + o, mask=m, other=0.0))
        x = tl.load(i_in + o, mask=m, other=0.0)
        h = f * h + (1 - f) * x * tl.sigmoid(x)
        tl.store(h_out + o, h, mask=m)


@autodiff(inputs_require_grad=(0, 1, 2))
def hgru_layer(i_in, f_in, low):
    B, T, D = i_in.shape
    h = torch.empty_like(i_in)
    hgru[(triton.cdiv(D, 128), B)](i_in, f_in, low, h, T, D, BD=128)
    return h
