import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def bce(z_ptr, t_ptr, acc_ptr, n, inv_n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = o < n
    z = tl.load(z_ptr + o, mask=ok, other=0.0)
    t = tl.load(t_ptr + o, mask=ok, other=0.0)
    l = tl.where(z > 0, z, 0.0) - z * t + tl.log(1 + tl.exp(-tl.abs(z)))
    tl.atomic_add(acc_ptr, tl.sum(tl.where(ok, l, 0.0)) * inv_n)


@autodiff(inputs_require_grad=(0,))
def bce_mean(z, t):
    acc = torch.zeros((), device=z.device)
    bce[(triton.cdiv(z.numel(), 2048),)](z, t, acc, z.numel(), 1.0 / z.numel(), BLOCK=2048)
    return acc
