import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def crps(ens, obs, out, E, BE: tl.constexpr):
    n = tl.program_id(0)
    e = tl.arange(0, BE)
    m = e < E
    v = tl.load(ens + n * E + e, mask=m, other=0.0)
    y = tl.load(obs + n)
    spread = tl.zeros((BE,), tl.float32)
    for j in range(E):
        spread += tl.where(m, tl.abs(v - tl.load(ens + n * E + j)), 0.0)
    miss = tl.sum(tl.where(m, tl.abs(v - y), 0.0), 0) / E
    tl.store(out + n, miss - tl.sum(spread, 0) / (2.0 * E * E))


@autodiff(inputs_require_grad=(0,))
def ensemble_crps(ens, obs):
    out = torch.empty_like(obs)
    crps[(obs.numel(),)](ens, obs, out, ens.shape[1], BE=triton.next_power_of_2(ens.shape[1]))
    return out
