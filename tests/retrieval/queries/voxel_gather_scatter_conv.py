import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def tap_gemm(x, w, pin, pout, ptr, y, CI: tl.constexpr, CO: tl.constexpr, B: tl.constexpr):
    tap = tl.program_id(0)
    lo, hi = tl.load(ptr + tap), tl.load(ptr + tap + 1)
    i = tl.arange(0, CI)
    o = tl.arange(0, CO)
    wt = tl.load(w + tap * CI * CO + i[:, None] * CO + o[None, :])
    for s in range(lo + tl.program_id(1) * B, hi, B * tl.num_programs(1)):
        k = s + tl.arange(0, B)
        src = tl.load(pin + k, mask=k < hi, other=0)
        dst = tl.load(pout + k, mask=k < hi, other=0)
        f = tl.load(x + src[:, None] * CI + i[None, :], mask=(k < hi)[:, None], other=0.0)
        tl.atomic_add(y + dst[:, None] * CO + o[None, :], tl.dot(f, wt), mask=(k < hi)[:, None])


@autodiff(inputs_require_grad=(0, 1))
def gather_scatter_conv(x, w, pin, pout, ptr, n_out):
    TAPS, CI, CO = w.shape
    y = torch.zeros(n_out, CO, device=x.device)
    tap_gemm[(TAPS, 8)](x, w, pin, pout, ptr, y, CI, CO, 32)
    return y
