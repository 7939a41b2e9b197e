"""Linear-chain conditional random field: negative log-likelihood of tag sequences.

Forward    a_0j = e_0j,  q_tij = a_t-1,i + W_ij,  a_tj = e_tj + log sum_i exp q_tij,
           Z = log sum_j exp a_n-1,j over n tokens;   l = Z - sum_t e_t,y_t - sum_t W_y_t-1,y_t
Backward   the posterior of a tag is P_tj = dZ/da_tj. At the end it is a softmax of a_n-1; before,
           P_t-1,i = sum_j P_tij,   P_tij = P_tj exp(q_tij) / sum_h exp(q_thj), the posterior of a pair:
           de_tj = dl (P_tj - [y_t = j]),   dW_ij = dl sum_t (P_tij - [y_t-1 = i, y_t = j])

Forward schedule: a program owns a sequence, has W in registers, and walks the tokens; a is stored. Its
largest number is moved to Z each step: only differences within a step matter, and fp32 keeps those of small
numbers.
Backward schedule: the same owner walks back. The textbook multiplies forward and backward probabilities,
exp(a + b - Z), three long sums whose rounding errors grow with the sequence. Posteriors alone suffice: a step
splits each P_tj over the tags before by a softmax of the saved a, sums to one by construction, and needs
neither b nor Z nor the emissions. The pairs are what dW adds up, in registers over the whole walk; it belongs
to all sequences, so each leaves one partial, added by a second kernel.

op: linear_chain_crf
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
def load_weights(w_ptr, j, L):
    return tl.load(w_ptr + j[:, None] * L + j[None, :], mask=(j[:, None] < L) & (j[None, :] < L), other=0.0)


@triton.jit
def crf_kernel(e_ptr, w_ptr, tags_ptr, tokens_ptr, a_ptr, loss_ptr, T, L, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.load(tokens_ptr + sequence)
    j = tl.arange(0, BLOCK)
    w = load_weights(w_ptr, j, L)
    first = sequence * T
    tag = tl.load(tags_ptr + first)
    a = tl.load(e_ptr + first * L + j, mask=j < L, other=-1e30)
    moved = tl.max(a, axis=0)
    a -= moved
    score = tl.load(e_ptr + first * L + tag)
    tl.store(a_ptr + first * L + j, a, mask=j < L)
    for t in range(1, n):
        row = (first + t) * L
        q = a[:, None] + w
        m = tl.max(q, axis=0)
        e = tl.load(e_ptr + row + j, mask=j < L, other=-1e30)
        a = e + m + tl.log(tl.sum(tl.exp(q - m[None, :]), axis=0))
        largest = tl.max(a, axis=0)
        a, moved = a - largest, moved + largest
        tl.store(a_ptr + row + j, a, mask=j < L)
        before = tag
        tag = tl.load(tags_ptr + first + t)
        score += tl.load(e_ptr + row + tag) + tl.load(w_ptr + before * L + tag)
    tl.store(loss_ptr + sequence, moved + tl.log(tl.sum(tl.exp(a), axis=0)) - score)


def crf_forward(e, w, tags, tokens):
    B, T, L = e.shape
    if w.shape != (L, L) or tags.shape != (B, T) or not 1 <= L <= 128 or T < 1:
        raise ValueError("need e (B, T, L), w (L, L), tags (B, T), of 1 to 128 tags")
    a, loss = torch.empty_like(e), torch.empty(B, device=e.device, dtype=torch.float32)
    blocks = {"BLOCK": triton.next_power_of_2(L), "num_warps": 16 if L > 64 else 4}
    crf_kernel[(B,)](e, w, tags, tokens, a, loss, T, L, **blocks)
    return loss, a


@autodiff(inputs_require_grad=(0, 1))
def crf_nll(e, w, tags, tokens):
    """e: (B, T, L); w: (L, L), from row to column; tags: int64 (B, T); tokens: int64 (B), at least 1."""
    return crf_forward(e.contiguous(), w.contiguous(), tags.contiguous(), tokens.contiguous())[0]


def reference(e, w, tags, tokens):
    a = e[:, 0]
    for t in range(1, e.shape[1]):
        stepped = e[:, t] + torch.logsumexp(a[:, :, None] + w, dim=1)
        a = torch.where(t < tokens[:, None], stepped, a)
    there = torch.arange(e.shape[1], device=e.device) < tokens[:, None]
    score = (e.gather(2, tags[..., None])[..., 0] * there).sum(dim=1)
    return torch.logsumexp(a, dim=1) - score - (w[tags[:, :-1], tags[:, 1:]] * there[:, 1:]).sum(dim=1)


SWEEP = [{"B": 1024, "T": 128, "L": 64}, {"B": 2039, "T": 50, "L": 19}]
SWEEP_CPU = [{"B": 4, "T": 15, "L": 7}, {"B": 9, "T": 4, "L": 18}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, L = (dims[name] for name in ("B", "T", "L"))
    e, w = torch.randn(B, T, L, device=device, dtype=dtype), torch.randn(L, L, device=device, dtype=dtype)
    tags = torch.randint(0, L, (B, T), device=device)
    return e, w, tags, torch.randint((T + 1) // 2, T + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def crf_backward_kernel(
    w_ptr, tags_ptr, tokens_ptr, a_ptr, dl_ptr, de_ptr, part_ptr, T, L, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    n, dl = tl.load(tokens_ptr + sequence), tl.load(dl_ptr + sequence)
    j = tl.arange(0, BLOCK)
    w = load_weights(w_ptr, j, L)
    for t in range(n, T):
        tl.store(de_ptr + (sequence * T + t) * L + j, tl.zeros([BLOCK], dtype=tl.float32), mask=j < L)
    last = sequence * T + n - 1
    tag = tl.load(tags_ptr + last)
    P = tl.exp(tl.load(a_ptr + last * L + j, mask=j < L, other=-1e30))
    P = P / tl.sum(P, axis=0)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for step in range(1, n):
        row = last - step
        after = de_ptr + (row + 1) * L + j
        tl.store(after, dl * (P - tl.where(j == tag, 1.0, 0.0)), mask=j < L)
        before = tl.load(tags_ptr + row)
        q = tl.load(a_ptr + row * L + j, mask=j < L, other=-1e30)[:, None] + w
        powers = tl.exp(q - tl.max(q, axis=0)[None, :])
        pairs = powers * (P / tl.sum(powers, axis=0))[None, :]
        P = tl.sum(pairs, axis=1)
        dw += pairs - tl.where((j[:, None] == before) & (j[None, :] == tag), 1.0, 0.0)
        tag = before
    de = dl * (P - tl.where(j == tag, 1.0, 0.0))
    tl.store(de_ptr + sequence * T * L + j, de, mask=j < L)
    mask = (j[:, None] < L) & (j[None, :] < L)
    tl.store(part_ptr + (sequence * L + j[:, None]) * L + j[None, :], dl * dw, mask=mask)


@triton.jit
def sum_parts_kernel(part_ptr, dw_ptr, parts, count, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_P, BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part[:, None] < parts) & (cols[None, :] < count)
        total += tl.load(part_ptr + part[:, None].to(tl.int64) * count + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, axis=0), mask=cols < count)


class CRFNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, w, tags, tokens):
        e, w, tags, tokens = (tensor.contiguous() for tensor in (e, w, tags, tokens))
        loss, a = crf_forward(e, w, tags, tokens)
        ctx.save_for_backward(w, tags, tokens, a)
        return loss

    @staticmethod
    def backward(ctx, dl):
        w, tags, tokens, a = ctx.saved_tensors
        (B, T, L), needs = a.shape, ctx.needs_input_grad
        de, dw = torch.empty_like(a), torch.empty_like(w)
        part = torch.empty((B, L, L), device=w.device, dtype=torch.float32)
        blocks = {"BLOCK": triton.next_power_of_2(L), "num_warps": 16 if L > 64 else 4}
        crf_backward_kernel[(B,)](w, tags, tokens, a, dl.contiguous(), de, part, T, L, **blocks)
        if needs[1]:
            sum_parts_kernel[(triton.cdiv(L * L, 64),)](part, dw, B, L * L, BLOCK_P=32, BLOCK=64)
        return de if needs[0] else None, dw if needs[1] else None, None, None


def crf_nll_autograd(e, w, tags, tokens):
    return CRFNLL.apply(e, w, tags, tokens)
