import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def newton_schulz(a, out, steps, N: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, N)
    x = tl.load(a + b * N * N + i[:, None] * N + i[None, :])
    x = x / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0))
    for _ in range(steps):
        g = tl.dot(x, tl.trans(x), input_precision="ieee")
        x = 3.4445 * x + tl.dot(
            -4.775 * g + 2.0315 * tl.dot(g, g, input_precision="ieee"), x, input_precision="ieee"
        )
    tl.store(out + b * N * N + i[:, None] * N + i[None, :], x)


@autodiff(inputs_require_grad=(0,))
def orthogonalise(a, steps=5):
    out = torch.empty_like(a)
    newton_schulz[(a.shape[0],)](a, out, steps, N=a.shape[1])
    return out
