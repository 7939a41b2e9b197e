"""Discounted sums backwards in time, cut where an episode ends:

    v[t] = reward[t] + gamma * (1 - done[t]) * v[t + 1],    v[T] = last

reward: (T, B), done: bool (T, B), last: (B,).
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def discounted_kernel(r_ptr, done_ptr, last_ptr, v_ptr, T, B, gamma, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < B
    v = tl.load(last_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    for back in range(T):
        t = T - 1 - back
        r = tl.load(r_ptr + t * B + cols, mask=mask, other=0.0).to(tl.float32)
        done = tl.load(done_ptr + t * B + cols, mask=mask, other=0)
        v = r + tl.where(done, 0.0, gamma * v)
        tl.store(v_ptr + t * B + cols, v, mask=mask)


@autodiff(inputs_require_grad=(0, 2))
def discounted(reward, done, last, gamma=0.95):
    reward, done, last = reward.contiguous(), done.contiguous(), last.contiguous()
    T, B = reward.shape
    v = torch.empty_like(reward)
    discounted_kernel[(triton.cdiv(B, 32),)](reward, done, last, v, T, B, gamma, BLOCK=32)
    return v


SWEEP = [{"T": 40, "B": 50}, {"T": 2050, "B": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, B = dims["T"], dims["B"]
    reward = torch.randn(T, B, device=device, dtype=dtype)
    done = torch.rand(T, B, device=device) < 0.1
    return (reward, done, torch.randn(B, device=device, dtype=dtype)), {"gamma": 0.95}
