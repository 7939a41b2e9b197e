import torch, triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def prefix(a, b, n, P: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, P)
    v = tl.load(a + r * n + i, mask=i < n, other=0.0)
    tl.store(b + r * n + i, tl.cumsum(v, 0), mask=i < n)


@autodiff(inputs_require_grad=(0,))
def cumsum(a):
    b = torch.empty_like(a)
    prefix[(a.shape[0],)](a, b, a.shape[1], triton.next_power_of_2(a.shape[1]))
    return b
