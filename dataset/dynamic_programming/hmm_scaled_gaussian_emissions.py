"""Hidden Markov model with Gaussian emissions: log-likelihood by the scaled forward algorithm.

Forward    A = row softmax of logits a, p = softmax of logits v, e_ts = exp(-|x_t - m_s|^2 / 2 - h_t), where
           h_t is the largest exponent of its step;  r_0s = p_s e_0s,  r_ts = e_ts sum_i f_t-1,i A_is,
           c_t = sum_s r_ts,  f_t = r_t / c_t;   l = sum_t (log c_t + h_t)
Backward   b_n-1 = 1,  w_ts = e_ts b_ts / c_t,  b_t-1,i = sum_s A_is w_ts. The posterior of a state is
           g_ts = f_ts b_ts, and the expected uses of a transition U_is = A_is sum_t f_t-1,i w_ts:
           dx_t = -dl sum_s g_ts (x_t - m_s),  dm_s = dl sum_t g_ts (x_t - m_s),
           da_is = dl (U_is - A_is sum_s U_is),   dv_s = dl (g_0s - p_s)

Forward schedule: a program owns a sequence and walks time with A in registers. Probabilities instead of their
logarithms: a step is a product of f with A and one division, not S^2 exponentials; f and c are stored.
Backward schedule: the same owner walks back; f b needs no normalising, the c of the forward did it. e is
rebuilt from x. The sums over time stay in registers: f w^T is added up without A, which multiplies once at
the end, and for the means the pull g (x - m) that dx needs as well. The parameters belong to all sequences:
each stores its part, and a second kernel adds the parts. The softmax of a row is corrected in the part
already, as it is linear.

op: hmm_log_likelihood
schedule: reverse_scan, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C, other: tl.constexpr):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=other)


@triton.jit
def softmax(v, axis: tl.constexpr):
    e = tl.exp(v - tl.expand_dims(tl.max(v, axis=axis), axis))
    return e / tl.expand_dims(tl.sum(e, axis=axis), axis)


@triton.jit
def emission(x, means, s, S):
    """e and h of one step, for states s."""
    u = x[None, :] - means
    exponent = tl.where(s < S, -0.5 * tl.sum(u * u, axis=1), -1e30)
    h = tl.max(exponent, axis=0)
    return tl.exp(exponent - h), h


@triton.jit
def hmm_kernel(
    x_ptr, m_ptr, a_ptr, v_ptr, steps_ptr, f_ptr, c_ptr, l_ptr, T, S, D,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.load(steps_ptr + sequence)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    means = load_tile(m_ptr, s, d, S, D, 0.0)
    A = softmax(load_tile(a_ptr, s, s, S, S, -1e30), 1)
    prior = softmax(tl.load(v_ptr + s, mask=s < S, other=-1e30), 0)
    l = 0.0
    for t in range(n):
        row = sequence * T + t
        e, h = emission(tl.load(x_ptr + row * D + d, mask=d < D, other=0.0), means, s, S)
        r = tl.where(s < S, prior * e, 0.0)
        c = tl.sum(r, axis=0)
        f = r / c
        l += tl.log(c) + h
        tl.store(f_ptr + row * S + s, f, mask=s < S)
        tl.store(c_ptr + row, c)
        prior = tl.sum(f[:, None] * A, axis=0)
    tl.store(l_ptr + sequence, l)


def tiling(m):
    S, D = m.shape
    if not 1 <= S <= 64 or not 1 <= D <= 64:
        raise ValueError(f"{S} states of {D} numbers: both must be from 1 to 64")
    blocks = {"BLOCK_S": triton.next_power_of_2(S), "BLOCK_D": triton.next_power_of_2(D)}
    return {**blocks, "num_warps": 8 if max(S, D) > 32 else 4}


def hmm_forward(x, m, a, v, steps):
    (B, T, D), S = x.shape, m.shape[0]
    if m.shape[1] != D or a.shape != (S, S) or v.shape != (S,):
        raise ValueError("need x (B, T, D), m (S, D), a (S, S), v (S)")
    f = torch.empty((B, T, S), device=x.device, dtype=torch.float32)
    c = torch.empty((B, T), device=x.device, dtype=torch.float32)
    l = torch.empty(B, device=x.device, dtype=torch.float32)
    hmm_kernel[(B,)](x, m, a, v, steps, f, c, l, T, S, D, **tiling(m))
    return l, f, c


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def hmm_log_likelihood(x, m, a, v, steps):
    """x: (B, T, D); m: (S, D), means; a: (S, S), v: (S), logits of steps and start; steps: int64 (B), from
    1.
    """
    inputs = (tensor.contiguous() for tensor in (x, m, a, v, steps))
    return hmm_forward(*inputs)[0]


def reference(x, m, a, v, steps):
    A = torch.log_softmax(a, dim=1)
    e = -0.5 * (x[:, :, None, :] - m).pow(2).sum(-1)
    f = torch.log_softmax(v, dim=0) + e[:, 0]
    for t in range(1, x.shape[1]):
        g = torch.logsumexp(f[:, :, None] + A, dim=1) + e[:, t]
        f = torch.where((t < steps)[:, None], g, f)  # a sequence that has ended waits
    return torch.logsumexp(f, dim=1)


SWEEP = [{"B": 1024, "T": 256, "S": 32, "D": 13}, {"B": 501, "T": 301, "S": 21, "D": 39}]
SWEEP_CPU = [{"B": 3, "T": 9, "S": 6, "D": 3}, {"B": 2, "T": 6, "S": 9, "D": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, S, D = (dims[name] for name in ("B", "T", "S", "D"))
    shapes = ((B, T, D), (S, D), (S, S), (S,))
    x, m, a, v = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    return x, m, a, v, torch.randint((T + 1) // 2, T + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def hmm_backward_kernel(
    x_ptr, m_ptr, a_ptr, v_ptr, steps_ptr, f_ptr, c_ptr, dl_ptr, dx_ptr, dm_ptr, da_ptr, dv_ptr, T, S, D,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    n, dl = tl.load(steps_ptr + sequence), tl.load(dl_ptr + sequence)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    means = load_tile(m_ptr, s, d, S, D, 0.0)
    A = softmax(load_tile(a_ptr, s, s, S, S, -1e30), 1)
    for t in range(n, T):
        tl.store(dx_ptr + (sequence * T + t) * D + d, tl.zeros([BLOCK_D], dtype=tl.float32), mask=d < D)
    b = tl.where(s < S, 1.0, 0.0)
    g = b
    uses = tl.zeros([BLOCK_S, BLOCK_S], dtype=tl.float32)
    dm = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    for step in range(n):
        row = sequence * T + n - 1 - step
        x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
        g = tl.load(f_ptr + row * S + s, mask=s < S, other=0.0) * b
        pull = g[:, None] * (x[None, :] - means)
        tl.store(dx_ptr + row * D + d, -dl * tl.sum(pull, axis=0), mask=d < D)
        dm += pull
        e, _ = emission(x, means, s, S)
        w = e * b / tl.load(c_ptr + row)
        before = tl.load(f_ptr + (row - 1) * S + s, mask=(s < S) & (step < n - 1), other=0.0)
        uses += before[:, None] * w[None, :]
        b = tl.where(s < S, tl.sum(A * w[None, :], axis=1), 0.0)
    uses *= A
    da = uses - A * tl.sum(uses, axis=1)[:, None]
    prior = softmax(tl.load(v_ptr + s, mask=s < S, other=-1e30), 0)
    da_mask = (s[:, None] < S) & (s[None, :] < S)
    tl.store(da_ptr + (sequence * S + s[:, None]) * S + s[None, :], dl * da, mask=da_mask)
    dm_mask = (s[:, None] < S) & (d[None, :] < D)
    tl.store(dm_ptr + (sequence * S + s[:, None]) * D + d[None, :], dl * dm, mask=dm_mask)
    tl.store(dv_ptr + sequence * S + s, dl * (g - prior), mask=s < S)


@triton.jit
def sum_parts_kernel(part_ptr, sum_ptr, parts, count, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_P, BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        total += load_tile(part_ptr, start + tl.arange(0, BLOCK_P), cols, parts, count, 0.0)
    tl.store(sum_ptr + cols, tl.sum(total, axis=0), mask=cols < count)


def summed(part, like):
    result = torch.empty_like(like)
    grid = (triton.cdiv(like.numel(), 64),)
    sum_parts_kernel[grid](part, result, part.shape[0], like.numel(), BLOCK_P=32, BLOCK=64)
    return result


class HMMLogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m, a, v, steps):
        inputs = tuple(tensor.contiguous() for tensor in (x, m, a, v, steps))
        l, f, c = hmm_forward(*inputs)
        ctx.save_for_backward(*inputs, f, c)
        return l

    @staticmethod
    def backward(ctx, dl):
        x, *parameters = ctx.saved_tensors[:4]
        (B, T, D), S, needs = x.shape, parameters[0].shape[0], ctx.needs_input_grad
        dx = torch.empty_like(x)
        parts = [torch.empty((B, *like.shape), device=x.device, dtype=torch.float32) for like in parameters]
        blocks = tiling(parameters[0])
        hmm_backward_kernel[(B,)](*ctx.saved_tensors, dl.contiguous(), dx, *parts, T, S, D, **blocks)
        grads = [
            summed(part, like) if need else None
            for part, like, need in zip(parts, parameters, needs[1:4], strict=True)
        ]
        return dx if needs[0] else None, *grads, None


def hmm_log_likelihood_autograd(x, m, a, v, steps):
    return HMMLogLikelihood.apply(x, m, a, v, steps)
