import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def scatter_messages(src, dst, w, x, y, nnz, D, BE: tl.constexpr, BD: tl.constexpr):
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (e < nnz)[:, None] & (d < D)[None, :]
    u = tl.load(src + e, mask=e < nnz, other=0)
    v = tl.load(dst + e, mask=e < nnz, other=0)
    a = tl.load(w + e, mask=e < nnz, other=0.0)
    m = tl.load(x + u[:, None] * D + d[None, :], mask=ok, other=0.0) * a[:, None]
    tl.atomic_add(y + v[:, None] * D + d[None, :], m, mask=ok)


@autodiff(inputs_require_grad=(2, 3))
def message_pass(src, dst, w, x, n):
    y = torch.zeros(n, x.shape[1], device=x.device)
    scatter_messages[(triton.cdiv(src.numel(), 32), triton.cdiv(x.shape[1], 32))](
        src, dst, w, x, y, src.numel(), x.shape[1], 32, 32
    )
    return y
