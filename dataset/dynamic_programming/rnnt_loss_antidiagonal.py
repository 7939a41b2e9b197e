"""Transducer loss: the probability of a label string under all monotone walks of frames and labels.

Forward    p_tuv = softmax of logits x_tuv;  from (t, u) a blank leads to (t + 1, u), label y_u to (t, u + 1).
           B_tu = log p_tu,0,  Y_tu = log p_tu,y_u;
           a_00 = 0,  h_tu = a_t-1,u + B_t-1,u,  v_tu = a_t,u-1 + Y_t,u-1,  a_tu = log(e^h_tu + e^v_tu);
           l = -Z,  Z = a_T-1,U + B_T-1,U
Backward   g_tu = dZ/da_tu, the posterior of a cell, goes to the two cells before in the shares sigma(h - v)
           and sigma(v - h). So with k_tu = h_tu - v_tu the steps have the posteriors
           o_tu = g_t+1,u sigma(k_t+1,u),  o_T-1,U = 1,   y_tu = g_t,u+1 sigma(-k_t,u+1),
           and g_tu = o_tu + y_tu:
           dx_tuv = dl (g_tu p_tuv - [v = 0] o_tu - [v = y_u] y_tu)

Forward schedule: owners of rows (t, u) reduce the classes to three numbers. Then a program owns an utterance:
the cells of an antidiagonal do not need each other, so a lane owns a u and walks t + u; its own a stays in a
register, the neighbour's comes from two rows of scratch. Of a cell only k is stored.
Backward schedule: the same lanes walk the antidiagonals back. k is all they need: the shares of a cell add up
to one, however large the sums of logarithms grew, where e^{a + b - Z} with a second table b would lose their
digits. The logits, by far the largest tensor, are met once more, by owners of rows who rebuild p from the
saved log-sum; log-probabilities of all classes are never stored.

op: rnnt_loss
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
def row_kernel(x_ptr, target_ptr, lse_ptr, blank_ptr, label_ptr, T, U1, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    u, utterance = row % U1, row // U1 // T
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * V + v, mask=v < V, other=-1e30)
        m_new = tl.maximum(m, x)
        total = total * tl.exp(m - m_new) + tl.where(v < V, tl.exp(x - m_new), 0.0)
        m = m_new
    largest = tl.max(m, axis=0)
    lse = largest + tl.log(tl.sum(total * tl.exp(m - largest), axis=0))
    label = tl.load(target_ptr + utterance * (U1 - 1) + u, mask=u < U1 - 1, other=0)
    tl.store(lse_ptr + row, lse)
    tl.store(blank_ptr + row, tl.load(x_ptr + row * V) - lse)
    tl.store(label_ptr + row, tl.load(x_ptr + row * V + label) - lse)


@triton.jit
def walk_kernel(
    blank_ptr, label_ptr, frames_ptr, lengths_ptr, scratch_ptr, k_ptr, loss_ptr, T, U1, BLOCK: tl.constexpr
):
    utterance = tl.program_id(0).to(tl.int64)
    frames, labels = tl.load(frames_ptr + utterance), tl.load(lengths_ptr + utterance)
    u = tl.arange(0, BLOCK)
    first = utterance * T * U1
    a = tl.full([BLOCK], -1e30, dtype=tl.float32)
    for diagonal in range(frames + labels):
        t = diagonal - u
        there = (t >= 0) & (t < frames) & (u <= labels)
        cell = first + t * U1 + u
        h = a + tl.load(blank_ptr + cell - U1, mask=there & (t >= 1), other=-1e30)
        scratch = scratch_ptr + (utterance * 2 + diagonal % 2) * BLOCK + u
        v = tl.load(scratch - 1, mask=there & (u >= 1), other=-1e30)
        v += tl.load(label_ptr + cell - 1, mask=there & (u >= 1), other=-1e30)
        m = tl.maximum(h, v)
        log_sum = m + tl.log(tl.exp(h - m) + tl.exp(v - m))
        a = tl.where(there, tl.where(diagonal == 0, 0.0, log_sum), a)
        tl.store(k_ptr + cell, h - v, mask=there)
        tl.store(scratch_ptr + (utterance * 2 + (diagonal + 1) % 2) * BLOCK + u, a)
        tl.debug_barrier()  # one is enough: the next diagonal writes the row that was read
    end = first + (frames - 1) * U1 + labels
    z = tl.sum(tl.where(u == labels, a, 0.0), axis=0) + tl.load(blank_ptr + end)
    tl.store(loss_ptr + utterance, -z)


def rnnt_forward(x, targets, frames, lengths):
    B, T, U1, V = x.shape
    if targets.shape != (B, U1 - 1) or V < 2 or T < 1 or U1 > 1024:
        raise ValueError("need x (B, T, U + 1, V) and targets (B, U), of two classes and up to 1023 labels")
    lse, blank, label, k = (torch.empty((B, T, U1), device=x.device, dtype=torch.float32) for _ in range(4))
    loss = torch.empty(B, device=x.device, dtype=torch.float32)
    row_kernel[(B * T * U1,)](x, targets, lse, blank, label, T, U1, V, BLOCK=512)
    BLOCK = triton.next_power_of_2(U1)
    scratch = torch.full((B, 2, BLOCK), -1e30, device=x.device, dtype=torch.float32)
    walk_kernel[(B,)](blank, label, frames, lengths, scratch, k, loss, T, U1, BLOCK=BLOCK)
    return loss, lse, k


@autodiff(inputs_require_grad=(0,))
def rnnt_loss(x, targets, frames, lengths):
    """x: (B, T, U + 1, V), logits, class 0 the blank; int64 targets (B, U), frames >= 1 and lengths (B)."""
    inputs = (tensor.contiguous() for tensor in (x, targets, frames, lengths))
    return rnnt_forward(*inputs)[0]


def reference(x, targets, frames, lengths):
    logp, losses = torch.log_softmax(x, dim=3), []
    for b, (T, U) in enumerate(zip(frames.tolist(), lengths.tolist(), strict=True)):
        row = [logp.new_zeros(())]
        for t in range(T):
            if t > 0:
                row = [a + logp[b, t - 1, u, 0] for u, a in enumerate(row)]
            for u in range(1, U + 1):
                up = row[u - 1] + logp[b, t, u - 1, targets[b, u - 1]]
                row[u:] = [torch.logaddexp(row[u], up) if t > 0 else up, *row[u + 1 :]]
        losses.append(-row[U] - logp[b, T - 1, U, 0])
    return torch.stack(losses)


SWEEP = [{"B": 8, "T": 200, "U": 40, "V": 1024}, {"B": 5, "T": 97, "U": 70, "V": 501}]
SWEEP_CPU = [{"B": 2, "T": 9, "U": 5, "V": 13}, {"B": 3, "T": 4, "U": 8, "V": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, U, V = (dims[name] for name in ("B", "T", "U", "V"))
    x = torch.randn(B, T, U + 1, V, device=device, dtype=dtype)
    targets = torch.randint(1, max(2, V), (B, U), device=device)
    frames = torch.randint((T + 1) // 2, T + 1, (B,), device=device)
    return x, targets, frames, torch.randint(U // 2, U + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def walk_back_kernel(frames_ptr, lengths_ptr, k_ptr, scratch_ptr, o_ptr, y_ptr, T, U1, BLOCK: tl.constexpr):
    utterance = tl.program_id(0).to(tl.int64)
    frames, labels = tl.load(frames_ptr + utterance), tl.load(lengths_ptr + utterance)
    u = tl.arange(0, BLOCK)
    first = utterance * T * U1
    o = tl.where(u == labels, 1.0, 0.0)  # what comes to (t, u) over its blank, from (t + 1, u)
    for step in range(frames + labels):
        t = frames + labels - 1 - step - u
        there = (t >= 0) & (t < frames) & (u <= labels)
        cell = first + t * U1 + u
        scratch = scratch_ptr + (utterance * 2 + step % 2) * BLOCK + u
        y = tl.load(scratch + 1, mask=there & (u < labels), other=0.0)
        tl.store(o_ptr + cell, o, mask=there)
        tl.store(y_ptr + cell, y, mask=there)
        k = tl.load(k_ptr + cell, mask=there, other=0.0)
        g = o + y
        scratch = scratch_ptr + (utterance * 2 + (step + 1) % 2) * BLOCK + u
        tl.store(scratch, tl.where(there, g * tl.sigmoid(-k), 0.0))
        o = tl.where(there, g * tl.sigmoid(k), o)
        tl.debug_barrier()  # one is enough: the next step writes the row that was read


@triton.jit
def logits_kernel(
    x_ptr, target_ptr, frames_ptr, lengths_ptr, lse_ptr, o_ptr, y_ptr, dl_ptr, dx_ptr, T, U1, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    u, t, utterance = row % U1, row // U1 % T, row // U1 // T
    there = (t < tl.load(frames_ptr + utterance)) & (u <= tl.load(lengths_ptr + utterance))
    o = tl.load(o_ptr + row, mask=there, other=0.0)
    y = tl.load(y_ptr + row, mask=there, other=0.0)
    dl, lse = tl.load(dl_ptr + utterance), tl.load(lse_ptr + row)
    label = tl.load(target_ptr + utterance * (U1 - 1) + u, mask=u < U1 - 1, other=0)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        p = tl.exp(tl.load(x_ptr + row * V + v, mask=(v < V) & there, other=-1e30) - lse)
        dx = (o + y) * p - tl.where(v == 0, o, 0.0) - tl.where(v == label, y, 0.0)
        tl.store(dx_ptr + row * V + v, tl.where(there, dl * dx, 0.0), mask=v < V)


class RNNTLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, targets, frames, lengths):
        inputs = tuple(tensor.contiguous() for tensor in (x, targets, frames, lengths))
        loss, *stats = rnnt_forward(*inputs)
        ctx.save_for_backward(*inputs, *stats)
        return loss

    @staticmethod
    def backward(ctx, dl):
        x, targets, frames, lengths, lse, k = ctx.saved_tensors
        B, T, U1, V = x.shape
        o, y, dx = torch.empty_like(k), torch.empty_like(k), torch.empty_like(x)
        BLOCK = triton.next_power_of_2(U1)
        scratch = torch.zeros((B, 2, BLOCK), device=x.device, dtype=torch.float32)
        counts = (frames, lengths)
        walk_back_kernel[(B,)](*counts, k, scratch, o, y, T, U1, BLOCK=BLOCK)
        logits_kernel[(B * T * U1,)](x, targets, *counts, lse, o, y, dl.contiguous(), dx, T, U1, V, BLOCK=512)
        return dx, None, None, None


def rnnt_loss_autograd(x, targets, frames, lengths):
    return RNNTLoss.apply(x, targets, frames, lengths)
