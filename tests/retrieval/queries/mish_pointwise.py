import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from kernel_agent import autodiff


@triton.jit
def mish_kernel(a, b, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    for base in range(pid * BLOCK, n, step):
        idx = base + tl.arange(0, BLOCK)
        live = idx < n
        t = tl.load(a + idx, mask=live, other=0.0).to(tl.float32)
        sp = tl.where(t > 20.0, t, libdevice.log1p(tl.exp(tl.minimum(t, 20.0))))
        tl.store(b + idx, t * libdevice.tanh(sp), mask=live)


@autodiff(inputs_require_grad=(0,))
def mish(a):
    a = a.contiguous()
    b = torch.empty_like(a)
    mish_kernel[(min(triton.cdiv(a.numel(), 1024), 264),)](a, b, a.numel(), BLOCK=1024)
    return b
