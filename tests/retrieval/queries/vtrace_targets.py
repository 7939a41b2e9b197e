import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def vtrace(rho, reward, value, boot, out, T, B, gamma, PB: tl.constexpr):
    b = tl.program_id(0) * PB + tl.arange(0, PB)
    m = b < B
    v_next = tl.load(boot + b, mask=m, other=0.0)
    acc = tl.zeros((PB,), tl.float32)
    for s in range(T):
        o = (T - 1 - s) * B + b
        w = tl.minimum(1.0, tl.load(rho + o, mask=m, other=0.0))
        v = tl.load(value + o, mask=m, other=0.0)
        d = w * (tl.load(reward + o, mask=m, other=0.0) + gamma * v_next - v)
        acc = d + gamma * w * acc
        tl.store(out + o, v + acc, mask=m)
        v_next = v


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def v_targets(rho, reward, value, boot, gamma=0.99):
    out = torch.empty_like(value)
    vtrace[(triton.cdiv(value.shape[1], 64),)](rho, reward, value, boot, out, *value.shape, gamma, PB=64)
    return out
