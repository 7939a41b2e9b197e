"""Structured hinge: the score of the best tag sequence, less that of the right one, with a margin.

Forward    e'_tj = e_tj + margin [y_t != j];  a_0j = e'_0j,  a_tj = e'_tj + max_i (a_t-1,i + W_ij), where
           k_tj is the first such i;   l = max_j a_n-1,j - sum_t e_t,y_t - sum_t W_y_t-1,y_t
Backward   the best path q is piecewise constant: q_n-1 from the last maximum, q_t-1 = k_t,q_t.
           de_tj = dl ([q_t = j] - [y_t = j]),
           dW_ij = dl sum_t ([q_t-1 = i, q_t = j] - [y_t-1 = i, y_t = j])

Forward schedule: a program owns a sequence, has W in registers, walks the tokens, and stores one pointer for
each (token, tag) and the last tag of the best path; no a is stored.
Backward schedule: nothing is computed again: the same owner follows the pointers back, one load a token, and
writes rows of de, zeros included. W has few numbers and many sequences, but a path touches only n - 1 of its
L^2, so a part of L^2 for each sequence would be nearly all zeros: the touched ones are added by atomics.
Where the best path goes as the right one does, the two cancel before they are sent, and a trained model sends
little.

op: structured_hinge
schedule: index_or_seed_replay, atomic_accumulate
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def viterbi_kernel(
    e_ptr, w_ptr, tags_ptr, tokens_ptr, pointer_ptr, last_ptr, loss_ptr, T, L, margin, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.load(tokens_ptr + sequence)
    j = tl.arange(0, BLOCK)
    mask = (j[:, None] < L) & (j[None, :] < L)
    w = tl.load(w_ptr + j[:, None] * L + j[None, :], mask=mask, other=0.0)
    first = sequence * T
    tag = tl.load(tags_ptr + first)
    a = tl.load(e_ptr + first * L + j, mask=j < L, other=-1e30) + tl.where(j == tag, 0.0, margin)
    score = tl.load(e_ptr + first * L + tag)
    for t in range(1, n):
        row = (first + t) * L
        before = tag
        tag = tl.load(tags_ptr + first + t)
        q = a[:, None] + w
        tl.store(pointer_ptr + row + j, tl.argmax(q, axis=0), mask=j < L)
        e = tl.load(e_ptr + row + j, mask=j < L, other=-1e30) + tl.where(j == tag, 0.0, margin)
        a = e + tl.max(q, axis=0)
        score += tl.load(e_ptr + row + tag) + tl.load(w_ptr + before * L + tag)
    tl.store(last_ptr + sequence, tl.argmax(a, axis=0))
    tl.store(loss_ptr + sequence, tl.max(a, axis=0) - score)


def hinge_forward(e, w, tags, tokens, margin):
    B, T, L = e.shape
    if w.shape != (L, L) or tags.shape != (B, T) or not 1 <= L <= 128 or T < 1:
        raise ValueError("need e (B, T, L), w (L, L), tags (B, T), of 1 to 128 tags")
    pointers = torch.empty((B, T, L), device=e.device, dtype=torch.int32)
    last = torch.empty(B, device=e.device, dtype=torch.int32)
    loss = torch.empty(B, device=e.device, dtype=torch.float32)
    blocks = {"BLOCK": triton.next_power_of_2(L), "num_warps": 8 if L > 64 else 4}
    viterbi_kernel[(B,)](e, w, tags, tokens, pointers, last, loss, T, L, margin, **blocks)
    return loss, pointers, last


@autodiff(inputs_require_grad=(0, 1))
def structured_hinge(e, w, tags, tokens, margin=1.0):
    """e: (B, T, L); w: (L, L), from row to column; tags: int64 (B, T); tokens: int64 (B), at least 1; gives
    (B).
    """
    inputs = (tensor.contiguous() for tensor in (e, w, tags, tokens))
    return hinge_forward(*inputs, margin)[0]


def reference(e, w, tags, tokens, margin=1.0):
    costs = e + margin * (tags[..., None] != torch.arange(e.shape[2], device=e.device))
    a = costs[:, 0]
    for t in range(1, e.shape[1]):
        stepped = costs[:, t] + (a[:, :, None] + w).max(dim=1).values
        a = torch.where(t < tokens[:, None], stepped, a)
    there = torch.arange(e.shape[1], device=e.device) < tokens[:, None]
    score = (e.gather(2, tags[..., None])[..., 0] * there).sum(dim=1)
    return a.max(dim=1).values - score - (w[tags[:, :-1], tags[:, 1:]] * there[:, 1:]).sum(dim=1)


SWEEP = [{"B": 2048, "T": 128, "L": 64}, {"B": 4001, "T": 61, "L": 19}]
SWEEP_CPU = [{"B": 4, "T": 9, "L": 6}, {"B": 7, "T": 4, "L": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, L = (dims[name] for name in ("B", "T", "L"))
    e, w = torch.randn(B, T, L, device=device, dtype=dtype), torch.randn(L, L, device=device, dtype=dtype)
    tags = torch.randint(0, L, (B, T), device=device)
    return e, w, tags, torch.randint((T + 1) // 2, T + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def follow_kernel(
    tags_ptr, tokens_ptr, pointer_ptr, last_ptr, dl_ptr, de_ptr, dw_ptr, T, L, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    n, dl = tl.load(tokens_ptr + sequence), tl.load(dl_ptr + sequence)
    j = tl.arange(0, BLOCK)
    for t in range(n, T):
        tl.store(de_ptr + (sequence * T + t) * L + j, tl.zeros([BLOCK], dtype=tl.float32), mask=j < L)
    best = tl.load(last_ptr + sequence)
    for step in range(n):
        row = sequence * T + n - 1 - step
        tag = tl.load(tags_ptr + row)
        de = tl.where(j == best, dl, 0.0) - tl.where(j == tag, dl, 0.0)
        tl.store(de_ptr + row * L + j, de, mask=j < L)
        if step < n - 1:
            before = tl.load(pointer_ptr + row * L + best)
            tag_before = tl.load(tags_ptr + row - 1)
            if (before != tag_before) | (best != tag):
                tl.atomic_add(dw_ptr + before * L + best, dl, sem="relaxed")
                tl.atomic_add(dw_ptr + tag_before * L + tag, -dl, sem="relaxed")
            best = before


class StructuredHinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, w, tags, tokens, margin):
        e, w, tags, tokens = (tensor.contiguous() for tensor in (e, w, tags, tokens))
        loss, pointers, last = hinge_forward(e, w, tags, tokens, margin)
        ctx.save_for_backward(tags, tokens, pointers, last)
        return loss

    @staticmethod
    def backward(ctx, dl):
        tags, tokens, pointers, last = ctx.saved_tensors
        B, T, L = pointers.shape
        de = torch.empty((B, T, L), device=dl.device, dtype=torch.float32)
        dw = torch.zeros((L, L), device=dl.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(L)
        follow_kernel[(B,)](tags, tokens, pointers, last, dl.contiguous(), de, dw, T, L, BLOCK=BLOCK)
        needs = ctx.needs_input_grad
        return de if needs[0] else None, dw if needs[1] else None, None, None, None


def structured_hinge_autograd(e, w, tags, tokens, margin=1.0):
    return StructuredHinge.apply(e, w, tags, tokens, margin)
