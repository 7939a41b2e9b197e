"""Cross-entropy with label smoothing, ignored rows and a penalty on the log of the partition sum, averaged
over the rows that count.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def smoothed_rows_kernel(
    x_ptr, target_ptr, loss_ptr, V, smoothing, z_weight, ignore_index, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        return
    cols = tl.arange(0, BLOCK)
    mask = cols < V
    x = tl.load(x_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    lse = top + tl.log(tl.sum(tl.exp(x - top), axis=0))
    mean = tl.sum(tl.where(mask, x, 0.0), axis=0) / V
    hit = tl.sum(tl.where(cols == target, x, 0.0), axis=0)
    loss = lse - (1 - smoothing) * hit - smoothing * mean + z_weight * lse * lse
    tl.store(loss_ptr + row, loss)


@triton.jit
def mean_kernel(loss_ptr, target_ptr, out_ptr, M, ignore_index, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows, mask=rows < M, other=ignore_index)
        total += tl.load(loss_ptr + rows, mask=rows < M, other=0.0)
        count += (target != ignore_index).to(tl.float32)
    tl.store(out_ptr, tl.sum(total, axis=0) / tl.maximum(tl.sum(count, axis=0), 1.0))


@autodiff(inputs_require_grad=(0,))
def smoothed_loss(x, target, smoothing=0.1, z_weight=1e-4, ignore_index=-100):
    """x: (M, V); target: int64 (M,)."""
    x, target = x.contiguous(), target.contiguous()
    M, V = x.shape
    rows = torch.empty(M, device=x.device, dtype=torch.float32)
    out = torch.empty((), device=x.device, dtype=torch.float32)
    smoothed_rows_kernel[(M,)](
        x, target, rows, V, smoothing, z_weight, ignore_index, BLOCK=triton.next_power_of_2(V)
    )
    mean_kernel[(1,)](rows, target, out, M, ignore_index, BLOCK=64)
    return out


SWEEP = [{"M": 70, "V": 40}, {"M": 6000, "V": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 2 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype)
    target = torch.randint(0, dims["V"], (dims["M"],), device=device)
    target[1::5] = -100
    return x, target
