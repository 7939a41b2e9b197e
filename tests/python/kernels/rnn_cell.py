"""h = tanh(W h + x_t): a small RNN, all states stored."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from triton.language.extra import libdevice

SWEEP = [{"B": 2, "T": 5, "D": 16}]


@triton.jit
def rnn_kernel(x_ptr, w_ptr, h_ptr, steps, D: tl.constexpr):
    batch = tl.program_id(0)
    dims = tl.arange(0, D)
    w = tl.load(w_ptr + dims[:, None] * D + dims[None, :])
    h = tl.zeros([D], dtype=tl.float32)
    t = 0
    while t < steps:
        x = tl.load(x_ptr + (batch * steps + t) * D + dims)
        h = libdevice.tanh(tl.sum(w * h[None, :], axis=1) + x)
        tl.store(h_ptr + (batch * steps + t) * D + dims, h)
        t += 1


@autodiff(inputs_require_grad=(0, 1))
def rnn(x, w):
    b, steps, d = x.shape
    h = torch.empty_like(x)
    rnn_kernel[(b,)](x, w, h, steps, D=d)
    return h


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["D"], dims["D"], device=device, dtype=dtype) * 0.3


def reference(x, w):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ w.t() + x[:, t])
        out.append(h)
    return torch.stack(out, 1)
