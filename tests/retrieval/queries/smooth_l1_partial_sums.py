import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def partial_loss(p, t, part, n, beta, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    d = tl.load(p + i, mask=live, other=0.0) - tl.load(t + i, mask=live, other=0.0)
    a = tl.abs(d)
    l = tl.where(a < beta, 0.5 * d * d / beta, a - 0.5 * beta)
    tl.store(part + tl.program_id(0), tl.sum(l, axis=0))


@triton.jit
def total_loss(part, out, k, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in range(0, k, BLOCK):
        i = s + tl.arange(0, BLOCK)
        acc += tl.load(part + i, mask=i < k, other=0.0)
    tl.store(out, tl.sum(acc, axis=0) / n)


@autodiff(inputs_require_grad=(0, 1))
def smooth_l1(pred, target, beta=1.0):
    n = pred.numel()
    k = triton.cdiv(n, 1024)
    part = torch.empty(k, device=pred.device, dtype=torch.float32)
    out = torch.empty((), device=pred.device, dtype=torch.float32)
    partial_loss[(k,)](pred, target, part, n, beta, BLOCK=1024)
    total_loss[(1,)](part, out, k, n, BLOCK=256)
    return out
