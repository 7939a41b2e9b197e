"""Cross-entropy of each row of logits with its target; a target of -100 is ignored."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def cross_entropy_kernel(x_ptr, t_ptr, loss_ptr, V, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    target = tl.load(t_ptr + row)
    x = tl.load(x_ptr + row * V + cols, mask=cols < V, other=-float("inf"))
    most = tl.max(x, axis=0)
    lse = most + tl.log(tl.sum(tl.exp(x - most), axis=0))
    hit = tl.sum(tl.where(cols == target, x, 0.0), axis=0)
    tl.store(loss_ptr + row, tl.where(target < 0, 0.0, lse - hit))


@autodiff(inputs_require_grad=(0,))
def cross_entropy(logits, target):
    logits = logits.contiguous()
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=logits.dtype)
    cross_entropy_kernel[(M,)](logits, target, loss, V, BLOCK=triton.next_power_of_2(V))
    return loss


SWEEP = [{"M": 6, "V": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    target = torch.randint(0, dims["V"], (dims["M"],), device=device)
    target[-1] = -100
    return torch.randn(dims["M"], dims["V"], device=device, dtype=dtype), target
