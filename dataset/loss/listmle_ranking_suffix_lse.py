"""ListMLE ranking loss: the likelihood of the right order when items are drawn without replacement.

Forward    with o the right order of a list and s_i = score of its i-th item:
           S_i = log sum_{k >= i} exp(s_k),  l = sum_i (S_i - s_i), one loss a list
Backward   s_i takes part in S_k for k <= i:  dl/ds_i = sum_{k <= i} exp(s_i - S_k) - 1.
           With P_i = log sum_{k <= i} exp(-S_k):  ds_i = dl (exp(s_i + P_i) - 1)

Forward schedule: a list is one tile, gathered by its order. S is a scan from the end whose step is the
logarithm of a sum, h + log(e^{a - h} + e^{b - h}), and not a running sum of exponentials: the tail of a
well-ordered list lies far below its first item, and exp(s - max) of it would be 0, its logarithm infinite.
Backward schedule: S runs from the end, so its adjoint runs from the start: the same scan, forwards, over
-S. Here too sums stay logarithms until the end: exp(-S_k) alone overflows, but s_i + P_i is at most
log(i + 1), since s_i <= S_k for k <= i. S is rebuilt by the forward's scan, cheaper than to save and gather
it; ds is scattered by the order, a permutation, so each number has one writer.

op: listmle_loss
schedule: reverse_scan, index_or_seed_replay
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def log_add(a, b):
    h = tl.maximum(a, b)
    return h + tl.log(tl.exp(a - h) + tl.exp(b - h))


@triton.jit
def load_list(s_ptr, order_ptr, L, BLOCK: tl.constexpr):
    """The scores of a list in the right order, large negative numbers after them; their places; S."""
    first = tl.program_id(0).to(tl.int64) * L
    i = tl.arange(0, BLOCK)
    place = first + tl.load(order_ptr + first + i, mask=i < L, other=0)
    s = tl.load(s_ptr + place, mask=i < L, other=0.0).to(tl.float32)
    s = tl.where(i < L, s, -1e30)  # finite, for differences of it
    return s, place, tl.associative_scan(s, 0, log_add, reverse=True)


@triton.jit
def listmle_kernel(s_ptr, order_ptr, loss_ptr, L, BLOCK: tl.constexpr):
    s, _, S = load_list(s_ptr, order_ptr, L, BLOCK)
    loss = tl.sum(tl.where(tl.arange(0, BLOCK) < L, S - s, 0.0), axis=0)
    tl.store(loss_ptr + tl.program_id(0), loss)


@autodiff(inputs_require_grad=(0,))
def listmle_loss(scores, order):
    """scores: (B, L); order: int64 (B, L), a list's items from best to worst; gives (B) in float32."""
    B, L = scores.shape
    if L > 4096:
        raise ValueError(f"a list of {L} does not fit one tile")
    loss = torch.empty(B, device=scores.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(L)
    listmle_kernel[(B,)](scores.contiguous(), order.contiguous(), loss, L, BLOCK=BLOCK)
    return loss


def reference(scores, order):
    s = scores.gather(1, order)
    return (s.flip(1).logcumsumexp(1).flip(1) - s).sum(1)


SWEEP = [{"B": 32768, "L": 1024}, {"B": 18919, "L": 121}]
SWEEP_CPU = [{"B": 9, "L": 31}, {"B": 3, "L": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["L"])
    relevance = torch.rand(shape, device=device)
    return 3 * torch.randn(shape, device=device, dtype=dtype), relevance.argsort(dim=1, descending=True)


# ---- backward ----


@triton.jit
def listmle_backward_kernel(s_ptr, order_ptr, dloss_ptr, ds_ptr, L, BLOCK: tl.constexpr):
    s, place, S = load_list(s_ptr, order_ptr, L, BLOCK)
    inside = tl.arange(0, BLOCK) < L
    P = tl.associative_scan(tl.where(inside, -S, -1e30), 0, log_add)
    ds = tl.load(dloss_ptr + tl.program_id(0)) * (tl.exp(tl.where(inside, s + P, 0.0)) - 1)
    tl.store(ds_ptr + place, ds.to(ds_ptr.dtype.element_ty), mask=inside)


class ListMLE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, order):
        scores, order = scores.contiguous(), order.contiguous()
        ctx.save_for_backward(scores, order)
        return listmle_loss(scores, order)

    @staticmethod
    def backward(ctx, dloss):
        scores, order = ctx.saved_tensors
        B, L = scores.shape
        ds = torch.empty_like(scores)
        BLOCK = triton.next_power_of_2(L)
        listmle_backward_kernel[(B,)](scores, order, dloss.contiguous(), ds, L, BLOCK=BLOCK)
        return ds, None


def listmle_loss_autograd(scores, order):
    return ListMLE.apply(scores, order)
