"""Generalised advantage estimation over a batch of environments.

Forward    d_t = r_t + gamma n_t v_{t+1} - v_t,  A_t = d_t + gamma lam n_t A_{t+1},  A_T = 0;
           n_t = 0 where an episode ends, else 1
Backward   the forward runs against time, so the adjoint runs with it:
           c_t = dA_t + gamma lam n_{t-1} c_{t-1};  dr_t = c_t,
           dv_t = gamma n_{t-1} c_{t-1} - c_t  for t < T,  dv_T = gamma n_{T-1} c_{T-1}

Forward schedule: a lane owns an environment; a program walks time in reverse, environments contiguous.
Backward schedule: the same lanes walk forward in time. v_t enters the deltas of t - 1 and t; since the lane
still holds gamma n_{t-1} c_{t-1} in a register when it comes to t, dv_t is written once, by one owner, with
no second pass.

op: gae
schedule: reverse_scan
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gae_kernel(r_ptr, v_ptr, live_ptr, adv_ptr, T, E, gamma, lam, BLOCK: tl.constexpr):
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = env < E
    adv = tl.zeros([BLOCK], dtype=tl.float32)
    v_next = tl.load(v_ptr + T * E + env, mask=mask, other=0.0).to(tl.float32)
    for step in range(T):
        t = T - 1 - step
        r = tl.load(r_ptr + t * E + env, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * E + env, mask=mask, other=0.0).to(tl.float32)
        live = tl.load(live_ptr + t * E + env, mask=mask, other=0).to(tl.float32)
        adv = r + gamma * live * v_next - v + gamma * lam * live * adv
        tl.store(adv_ptr + t * E + env, adv, mask=mask)
        v_next = v


@autodiff(inputs_require_grad=(0, 1))
def gae(r, v, live, gamma=0.99, lam=0.95):
    """r: (T, E) rewards; v: (T + 1, E) values; live: int32 (T, E), 0 where a step ends its episode."""
    r, v, live = r.contiguous(), v.contiguous(), live.contiguous()
    T, E = r.shape
    adv = torch.empty_like(r)
    gae_kernel[(triton.cdiv(E, 32),)](r, v, live, adv, T, E, gamma, lam, BLOCK=32)
    return adv


def reference(r, v, live, gamma=0.99, lam=0.95):
    adv, steps = torch.zeros_like(r[0]), []
    for t in range(r.shape[0] - 1, -1, -1):
        adv = r[t] + gamma * live[t] * v[t + 1] - v[t] + gamma * lam * live[t] * adv
        steps.append(adv)
    return torch.stack(steps[::-1])


SWEEP = [{"T": 128, "E": 65536}, {"T": 1024, "E": 4096}, {"T": 129, "E": 40009}]
SWEEP_CPU = [{"T": 21, "E": 35}, {"T": 4, "E": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E = dims["T"], dims["E"]
    r = torch.randn(T, E, device=device, dtype=dtype)
    v = torch.randn(T + 1, E, device=device, dtype=dtype)
    return r, v, (torch.rand(T, E, device=device) > 0.1).to(torch.int32)


# ---- backward ----


@triton.jit
def gae_backward_kernel(live_ptr, dadv_ptr, dr_ptr, dv_ptr, T, E, gamma, lam, BLOCK: tl.constexpr):
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = env < E
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # gamma n_{t-1} c_{t-1}
    for t in range(T):
        c = lam * carry + tl.load(dadv_ptr + t * E + env, mask=mask, other=0.0).to(tl.float32)
        tl.store(dr_ptr + t * E + env, c, mask=mask)
        tl.store(dv_ptr + t * E + env, carry - c, mask=mask)
        carry = gamma * tl.load(live_ptr + t * E + env, mask=mask, other=0).to(tl.float32) * c
    tl.store(dv_ptr + T * E + env, carry, mask=mask)


class GAE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, v, live, gamma, lam):
        live = live.contiguous()
        ctx.save_for_backward(live)
        ctx.gamma, ctx.lam = gamma, lam
        return gae(r, v, live, gamma, lam)

    @staticmethod
    def backward(ctx, dadv):
        (live,) = ctx.saved_tensors
        dadv = dadv.contiguous()
        T, E = live.shape
        dr = torch.empty_like(dadv)
        dv = torch.empty((T + 1, E), device=dadv.device, dtype=dadv.dtype)
        gae_backward_kernel[(triton.cdiv(E, 32),)](live, dadv, dr, dv, T, E, ctx.gamma, ctx.lam, BLOCK=32)
        needs = ctx.needs_input_grad
        return dr if needs[0] else None, dv if needs[1] else None, None, None, None


def gae_autograd(r, v, live, gamma=0.99, lam=0.95):
    return GAE.apply(r, v, live, gamma, lam)
