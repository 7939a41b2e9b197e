import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def norm_gate(x, z, w, y, stride_x, stride_z, stride_y, G, eps, BLOCK_G: tl.constexpr):
    row, grp = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK_G)
    m = k < G
    a = tl.load(x + row * stride_x + grp * G + k, mask=m, other=0.0).to(tl.float32)
    b = tl.load(z + row * stride_z + grp * G + k, mask=m, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / G + eps)
    c = tl.load(w + grp * G + k, mask=m, other=0.0).to(tl.float32)
    tl.store(y + row * stride_y + grp * G + k, a * scale * c * (b * tl.sigmoid(b)), mask=m)


@autodiff(inputs_require_grad=(0, 1, 2))
def rmsnorm_gated(x, z, w, groups=1, eps=1e-5):
    M, N = x.shape
    y = torch.empty_like(x)
    norm_gate[(M, groups)](
        x,
        z,
        w,
        y,
        x.stride(0),
        z.stride(0),
        y.stride(0),
        N // groups,
        eps,
        BLOCK_G=triton.next_power_of_2(N // groups),
    )
    return y
