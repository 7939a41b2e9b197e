"""A Kalman filter for each channel as a sequence layer: the gate is the gain, made from uncertainties.

Forward    per channel, from m_{-1} = 0, p_{-1} = 1, with r and q given by their logarithms:
           b_t = p_{t-1} + q,   e_t = b_t + r_t,   k_t = b_t / e_t,
           m_t = m_{t-1} + k_t (z_t - m_{t-1}),   p_t = (1 - k_t) b_t = k_t r_t
Backward   two adjoints, G of m_t and H of p_t, from all that is later:  with G = dm_t + ..,  H = dp_t + ..:
           dz_t = G k_t,   dk_t = G (z_t - m_{t-1}) + H r_t,   db_t = dk_t (1 - k_t) / e_t,
           dr_t = H k_t - dk_t k_t / e_t,   dq = sum over batch and time of db_t;
           to t-1:   G (1 - k_t)  and  db_t;   logarithms:  dlog r = r dr,  dlog q = q dq

Forward schedule: a program owns (batch, channel tile) and walks time with mean and variance in registers.
Both are outputs.
Backward schedule: the same owner in reverse with two adjoints. The variance runs on its own, but the mean
feeds it: G makes dk, dk makes db, and db is H of the step before, so that the two go in one walk, in that
order. b, e and k of a step come again from p_{t-1}, which is an output, so nothing is saved beside inputs and
outputs, and no variance is ever divided by: e_t is at least r_t. dq of a batch element adds up in registers
and is stored as a slot; a second kernel adds the slots.

op: kalman_scan
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_step(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def kalman_kernel(z_ptr, log_r_ptr, log_q_ptr, m_ptr, p_ptr, T, C, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    q = tl.exp(load_step(log_q_ptr, cols, mask))
    m = tl.zeros([BLOCK], dtype=tl.float32)
    p = tl.full([BLOCK], 1.0, dtype=tl.float32)
    for t in range(T):
        offs = (batch * T + t) * C + cols
        b, r = p + q, tl.exp(load_step(log_r_ptr, offs, mask))
        k = b / (b + r)
        m += k * (load_step(z_ptr, offs, mask) - m)
        p = k * r
        tl.store(m_ptr + offs, m, mask=mask)
        tl.store(p_ptr + offs, p, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def kalman(z, log_r, log_q):
    """z, log_r: (B, T, C); log_q: (C). Gives means and variances, (B, T, C) each."""
    z, log_r, log_q = z.contiguous(), log_r.contiguous(), log_q.contiguous()
    B, T, C = z.shape
    if log_r.shape != z.shape or log_q.shape != (C,):
        raise ValueError("z and log_r must have one shape, and log_q its channels")
    m, p = torch.empty_like(z), torch.empty_like(z)
    kalman_kernel[(triton.cdiv(C, 64), B)](z, log_r, log_q, m, p, T, C, BLOCK=64)
    return m, p


def reference(z, log_r, log_q):
    m, p, means, variances = torch.zeros_like(z[:, 0]), torch.ones_like(z[:, 0]), [], []
    for t in range(z.shape[1]):
        b = p + log_q.exp()
        k = b / (b + log_r[:, t].exp())
        m = m + k * (z[:, t] - m)
        p = (1 - k) * b
        means.append(m)
        variances.append(p)
    return torch.stack(means, dim=1), torch.stack(variances, dim=1)


SWEEP = [{"B": 32, "T": 512, "C": 1024}, {"B": 3, "T": 1021, "C": 500}]
SWEEP_CPU = [{"B": 3, "T": 22, "C": 15}, {"B": 1, "T": 5, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["C"])
    z, log_r = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return z, log_r, torch.randn(dims["C"], device=device, dtype=dtype) - 2


# ---- backward ----


@triton.jit
def kalman_backward_kernel(
    z_ptr, log_r_ptr, log_q_ptr, m_ptr, p_ptr, dm_ptr, dp_ptr, dz_ptr, dlog_r_ptr, dq_ptr, T, C,
    BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    q = tl.exp(load_step(log_q_ptr, cols, mask))
    G = tl.zeros([BLOCK], dtype=tl.float32)
    H = tl.zeros([BLOCK], dtype=tl.float32)
    dq = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = (batch * T + t) * C + cols
        m_before = load_step(m_ptr, offs - C, mask & (t > 0))
        p_before = tl.load(p_ptr + offs - C, mask=mask & (t > 0), other=1.0).to(tl.float32)
        b, r = p_before + q, tl.exp(load_step(log_r_ptr, offs, mask))
        e = b + r
        k, rest = b / e, r / e  # rest = 1 - k
        G += load_step(dm_ptr, offs, mask)
        H += load_step(dp_ptr, offs, mask)
        dk = G * (load_step(z_ptr, offs, mask) - m_before) + H * r
        tl.store(dz_ptr + offs, G * k, mask=mask)
        tl.store(dlog_r_ptr + offs, r * (H * k - dk * k / e), mask=mask)
        H = dk * rest / e
        dq += H
        G *= rest
    tl.store(dq_ptr + batch * C + cols, dq, mask=mask)


@triton.jit
def log_q_kernel(part_ptr, log_q_ptr, dlog_q_ptr, B, C, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        dq += tl.load(part_ptr + b * C + cols, mask=cols < C, other=0.0)
    q = tl.exp(load_step(log_q_ptr, cols, cols < C))
    tl.store(dlog_q_ptr + cols, q * dq, mask=cols < C)


class Kalman(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, log_r, log_q):
        z, log_r, log_q = z.contiguous(), log_r.contiguous(), log_q.contiguous()
        m, p = kalman(z, log_r, log_q)
        ctx.save_for_backward(z, log_r, log_q, m, p)
        return m, p

    @staticmethod
    def backward(ctx, dm, dp):
        z, log_r, log_q, m, p = ctx.saved_tensors
        (B, T, C), needs = z.shape, ctx.needs_input_grad
        dz, dlog_r, dlog_q = (torch.empty_like(tensor) for tensor in (z, log_r, log_q))
        part = torch.empty((B, C), device=z.device, dtype=torch.float32)
        kalman_backward_kernel[(triton.cdiv(C, 64), B)](
            z, log_r, log_q, m, p, dm.contiguous(), dp.contiguous(), dz, dlog_r, part, T, C, BLOCK=64
        )
        if needs[2]:
            log_q_kernel[(triton.cdiv(C, 64),)](part, log_q, dlog_q, B, C, BLOCK=64)
        grads = zip((dz, dlog_r, dlog_q), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def kalman_autograd(z, log_r, log_q):
    return Kalman.apply(z, log_r, log_q)
