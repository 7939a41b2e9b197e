"""The Manhattan distance of each point to its nearest centre, and a soft count of how many are near:
x (points, D), centres (K, D).
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def near_kernel(x_ptr, c_ptr, near_ptr, which_ptr, K, D, BLOCK_K: tl.constexpr):
    i = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    dist = tl.zeros([BLOCK_K], dtype=tl.float32)
    for d in range(D):
        x = tl.load(x_ptr + i * D + d).to(tl.float32)
        c = tl.load(c_ptr + k * D + d, mask=k < K, other=0.0).to(tl.float32)
        dist += tl.abs(x - c)
    dist = tl.where(k < K, dist, float("inf"))
    which = tl.argmin(dist, axis=0)
    tl.store(near_ptr + i, tl.sum(tl.where(k == which, dist, 0.0), axis=0))
    tl.store(which_ptr + i, which)


@autodiff(inputs_require_grad=(0, 1))
def nearest(x, centres):
    x, centres = x.contiguous(), centres.contiguous()
    M, D = x.shape
    near = torch.empty(M, device=x.device, dtype=x.dtype)
    which = torch.empty(M, device=x.device, dtype=torch.int32)
    K = centres.shape[0]
    near_kernel[(M,)](x, centres, near, which, K, D, BLOCK_K=triton.next_power_of_2(K))
    return near, which


SWEEP = [{"M": 60, "K": 9, "D": 5}, {"M": 33, "K": 300, "D": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["K"], dims["D"], device=device, dtype=dtype)
