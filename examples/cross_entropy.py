"""Cross-entropy of logits against class indices, a loss per row, ignored rows zero: the vocabulary is
walked once with a running maximum and a running sum.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def cross_entropy_kernel(logits_ptr, target_ptr, loss_ptr, row_stride, V, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        return
    logits_ptr += row * row_stride

    running_max = -float("inf")
    running_sum = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(x, axis=0))
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.sum(tl.exp(x - new_max), axis=0)
        running_max = new_max

    x_target = tl.load(logits_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, running_max + tl.log(running_sum) - x_target)


@autodiff(inputs_require_grad=(0,))
def cross_entropy(logits, target, ignore_index=-100):
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    BLOCK = min(4096, triton.next_power_of_2(V))
    cross_entropy_kernel[(M,)](
        logits, target, loss, logits.stride(0), V, ignore_index, BLOCK=BLOCK, num_warps=8
    )
    return loss


def reference(logits, target, ignore_index=-100):
    return torch.nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")


def flops(dims, mode):
    return dims["M"] * dims["V"] * {"fwd": 4, "bwd": 3}.get(mode, 7)


SWEEP = [
    {"M": 4096, "V": 32000},
    {"M": 2048, "V": 50257},
    {"M": 2048, "V": 128256, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, V = dims["M"], dims["V"]
    logits = 3 * torch.randn(M, V, device=device, dtype=dtype)
    target = torch.randint(0, V, (M,), device=device)
    target[1::7] = -100
    return logits, target
