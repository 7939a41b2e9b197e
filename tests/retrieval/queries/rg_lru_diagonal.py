import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def lru(a, x, y, L, C, W: tl.constexpr):
    # 채널마다 독립적인 점화식: h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t
    c = tl.program_id(1) * W + tl.arange(0, W)
    n = tl.program_id(0)
    ok = c < C
    pa = a + n * L * C + c
    px = x + n * L * C + c
    py = y + n * L * C + c
    h = tl.zeros((W,), dtype=tl.float32)
    for _ in range(L):
        g = tl.load(pa, mask=ok, other=0.0).to(tl.float32)
        h = g * h + tl.sqrt(1.0 - g * g) * tl.load(px, mask=ok, other=0.0)
        tl.store(py, h.to(y.dtype.element_ty), mask=ok)
        pa += C
        px += C
        py += C


@autodiff(inputs_require_grad=(0, 1))
def rglru(a, x):
    B, L, C = x.shape
    y = torch.empty_like(x)
    lru[(B, triton.cdiv(C, 64))](a, x, y, L, C, W=64)
    return y
