import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def dequantise(codes, scale, zero, out, G, GB: tl.constexpr):
    row, g = tl.program_id(0), tl.program_id(1)
    n_g = tl.num_programs(1)
    i = tl.arange(0, GB)
    c = tl.load(codes + (row * n_g + g) * G + i, mask=i < G, other=0).to(tl.float32)
    s = tl.load(scale + row * n_g + g)
    z = tl.load(zero + row * n_g + g)
    tl.store(out + (row * n_g + g) * G + i, s * (c - z), mask=i < G)


@autodiff(inputs_require_grad=(1, 2))
def dequant(codes, scale, zero):
    R, NG, G = codes.shape
    out = torch.empty(R, NG, G, device=codes.device, dtype=scale.dtype)
    dequantise[(R, NG)](codes, scale, zero, out, G, triton.next_power_of_2(G))
    return out
