"""Layer norm over the rows, with weight and bias."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / N, 0.0)
    r = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / N + eps)
    w, b = tl.load(w_ptr + cols, mask=mask, other=0.0), tl.load(b_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * N + cols, centred * r * w + b, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, w, b, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    layer_norm_kernel[(M,)](x, w, b, y, N, eps, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 9, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, w, b = (
        torch.randn(s, device=device, dtype=dtype) for s in ((dims["M"], dims["N"]), dims["N"], dims["N"])
    )
    return x, w, b
