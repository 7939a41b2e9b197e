import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def interleaved_rope(q, out, pos, base_log2, D: tl.constexpr, P: tl.constexpr):
    tok, head = tl.program_id(0), tl.program_id(1)
    nh = tl.num_programs(1)
    i = tl.arange(0, P)
    m = i < D // 2
    theta = tl.load(pos + tok).to(tl.float32) * tl.exp2(-base_log2 * (2 * i) / D)
    c, s = tl.cos(theta), tl.sin(theta)
    at = (tok * nh + head) * D + 2 * i
    e = tl.load(q + at, mask=m, other=0.0)
    o = tl.load(q + at + 1, mask=m, other=0.0)
    tl.store(out + at, e * c - o * s, mask=m)
    tl.store(out + at + 1, e * s + o * c, mask=m)


@autodiff(inputs_require_grad=(0,))
def rope(q, pos, base_log2=13.287712):
    T, H, D = q.shape
    out = torch.empty_like(q)
    interleaved_rope[(T, H)](q, out, pos, base_log2, D, triton.next_power_of_2(D // 2))
    return out
