"""Connectionist temporal classification: the probability of a label string under all its alignments.

Forward    p_tv = softmax of logits x_tv;  states s = 0 .. 2 L: blank, label 1, blank, .., label L, blank, of
           the classes c_s;  n_ts = log(e^{a_t-1,s} + e^{a_t-1,s-1} + [skip_s] e^{a_t-1,s-2}), where skip_s: s
           is a label, and not the one before;  a_ts = n_ts + log p_t,c_s,
           Z = log(e^{a_T-1,2L} + e^{a_T-1,2L-1}),
           l = -Z, and 0 where no alignment fits
Backward   the posterior of a state is g_ts = dZ/da_ts: at the end a softmax of the last two, before
           g_t-1,s = sum of g_tr e^{a_t-1,s - n_tr} over r = s, s + 1, and s + 2 if skip_r.
           Of a class it is the sum over its states, and as p is a softmax
           dx_tv = dl (p_tv - sum_{s: c_s = v} g_ts)

Forward schedule: rows of logits are reduced to their log-sum first, by owners of rows. Then a program owns an
utterance with a lane a state and walks time; neighbours are read from the stored a of the step before. Its
largest number is moved to Z each step, so that a stays small and keeps its digits however long the utterance
is.
Backward schedule: the same owner walks back in time. The posterior follows from a alone: a second table b,
with g = e^{a + b - Z}, would sum as many logarithms again, and its rounding errors. Only g leaves the walk; n
and g pass to the neighbours through two rows of scratch. What remains is independent for each (t, utterance),
so a grid of rows writes dx. A label that occurs twice has two states for one class; scattering them would
need atomics, so the owner of classes compares them with all labels and sums what matches, which also stores
each number once. Log-probabilities are never stored.

op: ctc_loss
schedule: reverse_scan, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def row_lse_kernel(x_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * V + v, mask=v < V, other=-1e30)
        m_new = tl.maximum(m, x)
        total = total * tl.exp(m - m_new) + tl.where(v < V, tl.exp(x - m_new), 0.0)
        m = m_new
    largest = tl.max(m, axis=0)
    tl.store(lse_ptr + row, largest + tl.log(tl.sum(total * tl.exp(m - largest), axis=0)))


@triton.jit
def log_add(a, b, c):
    m = tl.maximum(tl.maximum(a, b), c)
    return m + tl.log(tl.exp(a - m) + tl.exp(b - m) + tl.exp(c - m))


@triton.jit
def states(target_ptr, utterance, s, L, own_L):
    """Which states are there, their classes, and which may be entered from two before."""
    place = target_ptr + utterance * L + s // 2
    there = s < 2 * own_L + 1
    label = there & (s % 2 == 1)
    c = tl.load(place, mask=label, other=0)
    before = tl.load(place - 1, mask=label & (s >= 3), other=0)
    return there, c, label & (s >= 3) & (c != before)


@triton.jit
def ctc_kernel(
    x_ptr, lse_ptr, target_ptr, frames_ptr, lengths_ptr, a_ptr, z_ptr, loss_ptr, T, L, V, BLOCK: tl.constexpr
):
    utterance = tl.program_id(0).to(tl.int64)
    frames, own_L = tl.load(frames_ptr + utterance), tl.load(lengths_ptr + utterance)
    s = tl.arange(0, BLOCK)
    there, c, skip = states(target_ptr, utterance, s, L, own_L)
    S = 2 * L + 1
    row = utterance * T
    logp = tl.load(x_ptr + row * V + c, mask=there, other=0.0) - tl.load(lse_ptr + row)
    a = tl.where(there & (s < 2), logp, -1e30)
    z = tl.max(a, axis=0)
    a = tl.where(there, a - z, -1e30)
    tl.store(a_ptr + row * S + s, a, mask=s < S)
    for t in range(1, frames):
        tl.debug_barrier()  # lanes read what their neighbours stored
        row = utterance * T + t
        before = a_ptr + (row - 1) * S + s
        one = tl.load(before - 1, mask=there & (s >= 1), other=-1e30)
        two = tl.load(before - 2, mask=there & skip, other=-1e30)
        logp = tl.load(x_ptr + row * V + c, mask=there, other=0.0) - tl.load(lse_ptr + row)
        a = log_add(a, one, two) + logp
        largest = tl.max(tl.where(there, a, -1e30), axis=0)
        a, z = tl.where(there, a - largest, -1e30), z + largest
        tl.store(a_ptr + row * S + s, a, mask=s < S)
    last = tl.where(there & (s >= 2 * own_L - 1), a, -1e30)
    m = tl.max(last, axis=0)
    z += m + tl.log(tl.sum(tl.exp(last - m), axis=0))
    tl.store(z_ptr + utterance, z)
    tl.store(loss_ptr + utterance, tl.where(z > -1e29, -z, 0.0))


def ctc_forward(x, targets, frames, lengths):
    (B, T, V), L = x.shape, targets.shape[1]
    if V < 2 or T < 1 or not 1 <= L <= 1000:
        raise ValueError("need two classes, a frame, and from 1 to 1000 labels")
    lse, z, loss = (torch.empty(n, device=x.device, dtype=torch.float32) for n in (B * T, B, B))
    a = torch.empty((B, T, 2 * L + 1), device=x.device, dtype=torch.float32)
    row_lse_kernel[(B * T,)](x, lse, V, BLOCK=512)
    BLOCK = triton.next_power_of_2(2 * L + 1)
    ctc_kernel[(B,)](x, lse, targets, frames, lengths, a, z, loss, T, L, V, BLOCK=BLOCK)
    return loss, lse, a, z


@autodiff(inputs_require_grad=(0,))
def ctc_loss(x, targets, frames, lengths):
    """x: (B, T, V), logits, class 0 the blank; targets: int64 (B, L); frames, lengths: int64 (B), at least
    1.
    """
    x, targets = x.contiguous(), targets.contiguous()
    return ctc_forward(x, targets, frames.contiguous(), lengths.contiguous())[0]


def reference(x, targets, frames, lengths):
    logp = torch.log_softmax(x, dim=2).transpose(0, 1)
    return torch.nn.functional.ctc_loss(logp, targets, frames, lengths, reduction="none", zero_infinity=True)


SWEEP = [{"B": 64, "T": 500, "L": 80, "V": 1024}, {"B": 17, "T": 301, "L": 150, "V": 33}]
SWEEP_CPU = [{"B": 3, "T": 17, "L": 4, "V": 11}, {"B": 2, "T": 9, "L": 5, "V": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, L, V = (dims[name] for name in ("B", "T", "L", "V"))
    x = torch.randn(B, T, V, device=device, dtype=dtype)
    targets = torch.randint(1, max(2, V), (B, L), device=device)
    frames = torch.randint((T + 1) // 2, T + 1, (B,), device=device)
    return x, targets, frames, torch.randint((L + 1) // 2, L + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def posterior_kernel(
    target_ptr, frames_ptr, lengths_ptr, a_ptr, scratch_ptr, g_ptr, T, L, BLOCK: tl.constexpr
):
    utterance = tl.program_id(0).to(tl.int64)
    frames, own_L = tl.load(frames_ptr + utterance), tl.load(lengths_ptr + utterance)
    s = tl.arange(0, BLOCK)
    there, _, skip = states(target_ptr, utterance, s, L, own_L)
    after, _, skip_after = states(target_ptr, utterance, s + 2, L, own_L)
    S = 2 * L + 1
    last = utterance * T + frames - 1
    a = tl.load(a_ptr + last * S + s, mask=there & (s >= 2 * own_L - 1), other=-1e30)
    g = tl.exp(a - tl.max(a, axis=0))
    g = g / tl.sum(g, axis=0)
    tl.store(g_ptr + last * S + s, g, mask=there)
    for step in range(1, frames):
        row = (last - step) * S + s
        a = tl.load(a_ptr + row, mask=there, other=-1e30)
        one = tl.load(a_ptr + row - 1, mask=there & (s >= 1), other=-1e30)
        two = tl.load(a_ptr + row - 2, mask=there & skip, other=-1e30)
        n = log_add(a, one, two)
        scratch = scratch_ptr + (utterance * 2 + step % 2) * 2 * S + s
        tl.store(scratch, g, mask=s < S)
        tl.store(scratch + S, n, mask=s < S)
        tl.debug_barrier()  # one is enough: the next step writes the other row
        g = tl.where(there, g * tl.exp(a - n), 0.0)
        follows = s + 1 < 2 * own_L + 1
        n_one = tl.load(scratch + S + 1, mask=follows, other=0.0)
        g += tl.load(scratch + 1, mask=follows, other=0.0) * tl.exp(tl.where(follows, a - n_one, 0.0))
        n_two = tl.load(scratch + S + 2, mask=after & skip_after, other=0.0)
        weight = tl.exp(tl.where(after & skip_after, a - n_two, 0.0))
        g += tl.load(scratch + 2, mask=after & skip_after, other=0.0) * weight
        tl.store(g_ptr + row, g, mask=there)


@triton.jit
def logits_kernel(
    x_ptr, lse_ptr, target_ptr, frames_ptr, lengths_ptr, z_ptr, g_ptr, dl_ptr, dx_ptr, T, L, V,
    BLOCK_L: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    utterance = row // T
    own_L = tl.load(lengths_ptr + utterance)
    counts = (row % T < tl.load(frames_ptr + utterance)) & (tl.load(z_ptr + utterance) > -1e29)
    dl = tl.where(counts, tl.load(dl_ptr + utterance), 0.0)
    own_L = tl.where(counts, own_L, -1)  # g is unwritten where nothing counts
    lse = tl.load(lse_ptr + row)
    g_row = g_ptr + row * (2 * L + 1)
    blank = tl.zeros([BLOCK_L], dtype=tl.float32)
    for start in range(0, own_L + 1, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        blank += tl.load(g_row + 2 * place, mask=place <= own_L, other=0.0)
    blank_sum = tl.sum(blank, axis=0)
    for v_start in range(0, V, BLOCK_V):
        v = v_start + tl.arange(0, BLOCK_V)
        posterior = tl.where(v == 0, blank_sum, 0.0)
        for start in range(0, own_L, BLOCK_L):
            place = start + tl.arange(0, BLOCK_L)
            g = tl.load(g_row + 2 * place + 1, mask=place < own_L, other=0.0)
            c = tl.load(target_ptr + utterance * L + place, mask=place < own_L, other=-1)
            posterior += tl.sum(tl.where(c[:, None] == v[None, :], g[:, None], 0.0), axis=0)
        p = tl.exp(tl.load(x_ptr + row * V + v, mask=v < V, other=0.0) - lse)
        tl.store(dx_ptr + row * V + v, tl.where(counts, dl * (p - posterior), 0.0), mask=v < V)


class CTCLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, targets, frames, lengths):
        x, targets = x.contiguous(), targets.contiguous()
        frames, lengths = frames.contiguous(), lengths.contiguous()
        loss, lse, a, z = ctc_forward(x, targets, frames, lengths)
        ctx.save_for_backward(x, targets, frames, lengths, lse, a, z)
        return loss

    @staticmethod
    def backward(ctx, dl):
        x, targets, frames, lengths, lse, a, z = ctx.saved_tensors
        (B, T, V), L = x.shape, targets.shape[1]
        g, dx = torch.empty_like(a), torch.empty_like(x)
        scratch = torch.empty((B, 2, 2, 2 * L + 1), device=x.device, dtype=torch.float32)
        inputs = (x, lse, targets, frames, lengths)
        BLOCK = triton.next_power_of_2(2 * L + 1)
        posterior_kernel[(B,)](targets, frames, lengths, a, scratch, g, T, L, BLOCK=BLOCK)
        logits_kernel[(B * T,)](*inputs, z, g, dl.contiguous(), dx, T, L, V, BLOCK_L=16, BLOCK_V=128)
        return dx, None, None, None


def ctc_loss_autograd(x, targets, frames, lengths):
    return CTCLoss.apply(x, targets, frames, lengths)
