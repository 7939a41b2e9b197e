import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def one_side(a, b, logit_scale, out, N, D: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    d = tl.arange(0, D)
    s = tl.exp(tl.load(logit_scale))
    x = tl.load(a + i[:, None] * D + d[None, :], mask=(i < N)[:, None], other=0.0)
    m = tl.full((BI,), -1e30, tl.float32)
    z = tl.zeros((BI,), tl.float32)
    own = tl.zeros((BI,), tl.float32)
    for j0 in range(0, N, BJ):
        j = j0 + tl.arange(0, BJ)
        y = tl.load(b + j[None, :] * D + d[:, None], mask=(j < N)[None, :], other=0.0)
        t = tl.dot(x, y) * s
        t = tl.where((j < N)[None, :], t, -1e30)
        own += tl.sum(tl.where(i[:, None] == j[None, :], t, 0.0), 1)
        mm = tl.maximum(m, tl.max(t, 1))
        z = z * tl.exp(m - mm) + tl.sum(tl.exp(t - mm[:, None]), 1)
        m = mm
    tl.store(out + i, m + tl.log(z) - own, mask=i < N)


@autodiff(inputs_require_grad=(0, 1, 2))
def clip_loss(img, txt, logit_scale):
    N, D = img.shape
    rows, cols = torch.empty(N, device=img.device), torch.empty(N, device=img.device)
    one_side[(triton.cdiv(N, 32),)](img, txt, logit_scale, rows, N, D, 32, 32)
    one_side[(triton.cdiv(N, 32),)](txt, img, logit_scale, cols, N, D, 32, 32)
    return (rows + cols) / 2
