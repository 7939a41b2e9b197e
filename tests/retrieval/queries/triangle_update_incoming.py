import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def tri_mul(left, right, out, n, C, T: tl.constexpr, TK: tl.constexpr):
    c = tl.program_id(2)
    i = tl.program_id(0) * T + tl.arange(0, T)
    j = tl.program_id(1) * T + tl.arange(0, T)
    acc = tl.zeros((T, T), tl.float32)
    for k0 in range(0, n, TK):
        k = k0 + tl.arange(0, TK)
        l = tl.load(
            left + (k[None, :] * n + i[:, None]) * C + c, mask=(k < n)[None, :] & (i < n)[:, None], other=0.0
        )
        r = tl.load(
            right + (k[:, None] * n + j[None, :]) * C + c, mask=(k < n)[:, None] & (j < n)[None, :], other=0.0
        )
        acc += tl.dot(l, r, input_precision="ieee")
    tl.store(out + (i[:, None] * n + j[None, :]) * C + c, acc, mask=(i < n)[:, None] & (j < n)[None, :])


@autodiff(inputs_require_grad=(0, 1))
def triangle_incoming(left, right):
    n, _, C = left.shape
    out = torch.empty_like(left)
    tri_mul[(triton.cdiv(n, 32), triton.cdiv(n, 32), C)](left, right, out, n, C, T=32, TK=32)
    return out
