import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gae(reward, value, done, adv, T, E, gamma, lam, BE: tl.constexpr):
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    ok = e < E
    nxt = tl.load(value + T * E + e, mask=ok, other=0.0)
    run = tl.zeros((BE,), tl.float32)
    for i in range(T):
        t = T - 1 - i
        alive = 1.0 - tl.load(done + t * E + e, mask=ok, other=0.0)
        v = tl.load(value + t * E + e, mask=ok, other=0.0)
        delta = tl.load(reward + t * E + e, mask=ok, other=0.0) + gamma * nxt * alive - v
        run = delta + gamma * lam * alive * run
        tl.store(adv + t * E + e, run, mask=ok)
        nxt = v


@autodiff(inputs_require_grad=(0, 1))
def advantages(reward, value, done, gamma=0.99, lam=0.95):
    adv = torch.empty_like(reward)
    T, E = reward.shape
    gae[(triton.cdiv(E, 64),)](reward, value, done, adv, T, E, gamma, lam, BE=64)
    return adv
