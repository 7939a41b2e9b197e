import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def spatial_energy(x, e, HW, C, B: tl.constexpr, BC: tl.constexpr):
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BC,), tl.float32)
    for s in range(0, HW, B):
        p = s + tl.arange(0, B)
        v = tl.load(
            x + (n * HW + p)[:, None] * C + c[None, :], mask=(p < HW)[:, None] & (c < C)[None, :], other=0.0
        )
        acc += tl.sum(v * v, axis=0)
    tl.store(e + n * C + c, tl.sqrt(acc), mask=c < C)


@triton.jit
def respond(x, e, w, b, y, HW, C, CP: tl.constexpr):
    n, p = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CP)
    ok = c < C
    g = tl.load(e + n * C + c, mask=ok, other=0.0)
    nx = g / (tl.sum(g, axis=0) / C + 1e-6)
    v = tl.load(x + (n * HW + p) * C + c, mask=ok, other=0.0)
    o = tl.load(w + c, mask=ok, other=0.0) * v * nx + tl.load(b + c, mask=ok, other=0.0) + v
    tl.store(y + (n * HW + p) * C + c, o, mask=ok)


@autodiff(inputs_require_grad=(0, 1, 2))
def grn(x, w, b):
    N, H, W, C = x.shape
    e = torch.empty(N, C, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    spatial_energy[(N, triton.cdiv(C, 64))](x, e, H * W, C, 64, 64)
    respond[(N, H * W)](x, e, w, b, y, H * W, C, triton.next_power_of_2(C))
    return y
