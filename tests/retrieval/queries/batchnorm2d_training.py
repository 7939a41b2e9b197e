import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def bn_train(x, gamma, beta, y, N, C, HW, eps, T: tl.constexpr):
    ch = tl.program_id(0)
    tot = tl.zeros((T,), tl.float32)
    sq = tl.zeros((T,), tl.float32)
    for n in range(N):
        for s in range(0, HW, T):
            p = s + tl.arange(0, T)
            v = tl.load(x + (n * C + ch) * HW + p, mask=p < HW, other=0.0)
            tot += v
            sq += v * v
    mean = tl.sum(tot, 0) / (N * HW)
    var = tl.sum(sq, 0) / (N * HW) - mean * mean
    k = tl.load(gamma + ch) / tl.sqrt(var + eps)
    b = tl.load(beta + ch) - mean * k
    for n in range(N):
        for s in range(0, HW, T):
            p = s + tl.arange(0, T)
            v = tl.load(x + (n * C + ch) * HW + p, mask=p < HW, other=0.0)
            tl.store(y + (n * C + ch) * HW + p, v * k + b, mask=p < HW)


@autodiff(inputs_require_grad=(0, 1, 2))
def batch_norm(x, gamma, beta, eps=1e-5):
    N, C = x.shape[:2]
    y = torch.empty_like(x)
    bn_train[(C,)](x, gamma, beta, y, N, C, x[0, 0].numel(), eps, T=512)
    return y
