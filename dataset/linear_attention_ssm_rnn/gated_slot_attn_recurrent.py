"""Gated slot attention: a softmax over a few memory slots, whose keys and values forget at one rate.

Forward    M slots, a_t = e^{g_t} one gate a slot:   K_t = a_t * K_{t-1} + (1 - a_t) k_t^T  (M x DK),
           p_t = softmax(K_t q_t),   V_t = a_t * V_{t-1} + (1 - a_t) v_t^T  (M x DV),   o_t = V_t^T p_t
Backward   X and Y are the gradients of V_t and K_t, from all outputs from t on:
           X <- X + p_t do_t^T,   w_t = p_t * (V_t do_t - <p_t, V_t do_t>),   Y <- Y + w_t q_t^T,
           dq_t = K_t^T w_t,   dk_t = Y^T (1 - a_t),   dv_t = X^T (1 - a_t),
           dg_t = a_t * rowsum(X * (V_{t-1} - v_t) + Y * (K_{t-1} - k_t)),   then  X <- a_t * X,  Y <- a_t * Y

Forward schedule: a softmax ties all slots and a score all of DK, so neither memory can be cut: a program owns
a head, with both in registers, and walks time. It stores p, and both memories before every SPAN-th step.
Backward schedule: the same owner walks back, a span at a time. The gate needs the memories before each step,
and to run them backwards would divide by a: the span is walked forward once more from its checkpoint, into a
scratch of SPAN steps a program, and then back with X and Y. The two recurrences meet in w alone: the output's
gradient passes through V and the softmax into Y within one step, so that one walk serves both, and the gate
that they share gets both terms in one row sum. No slot is anybody else's: each gradient has one writer.
The sum of w over the slots is 0, and what rounding leaves of it is multiplied by what all slots have in
common, which may be far more than what tells them apart. So the mean is taken off twice: what is left of it
after the first time is small, and so is its rounding.

op: gated_slot_attention
schedule: reverse_scan, chunk_state_pass, row_reduce_correct, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPAN = 16


def tiling(q, v, g):
    BLOCK_M, BLOCK_K, BLOCK_V = (triton.next_power_of_2(x.shape[3]) for x in (g, q, v))
    return {"SPAN": SPAN, "BLOCK_M": BLOCK_M, "BLOCK_K": BLOCK_K, "BLOCK_V": BLOCK_V, "num_warps": 8}


@triton.jit
def load_row(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, i, size):
    tl.store(ptr + i, value.to(ptr.dtype.element_ty), mask=i < size)


@triton.jit
def load_memory(ptr, m, d, M, D):
    mask = (m < M)[:, None] & (d < D)[None, :]
    return tl.load(ptr + m[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_memory(ptr, value, m, d, M, D):
    mask = (m < M)[:, None] & (d < D)[None, :]
    tl.store(ptr + m[:, None] * D + d[None, :], value, mask=mask)


@triton.jit
def remember(memory, a, row):
    return a[:, None] * memory + (1 - a)[:, None] * row[None, :]


@triton.jit
def slot_attention_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, p_ptr, saved_k_ptr, saved_v_ptr, T, M, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    K = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    V = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            span = head * spans + t // SPAN
            store_memory(saved_k_ptr + span * M * DK, K, m, d, M, DK)
            store_memory(saved_v_ptr + span * M * DV, V, m, e, M, DV)
        step = head * T + t
        a = tl.exp(load_row(g_ptr + step * M, m, M))
        K = remember(K, a, load_row(k_ptr + step * DK, d, DK))
        V = remember(V, a, load_row(v_ptr + step * DV, e, DV))
        s = tl.sum(K * load_row(q_ptr + step * DK, d, DK)[None, :], axis=1)
        s = tl.where(m < M, s, -float("inf"))
        p = tl.exp(s - tl.max(s, axis=0))
        p = p / tl.sum(p, axis=0)
        store_row(p_ptr + step * M, p, m, M)
        store_row(o_ptr + step * DV, tl.sum(V * p[:, None], axis=0), e, DV)


def slot_attention_forward(q, k, v, g):
    (B, H, T, DK), DV, M = q.shape, v.shape[3], g.shape[3]
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or g.shape[:3] != q.shape[:3]:
        raise ValueError("q and k must have one shape, and v and g its batch, heads and time")
    if M * max(DK, DV) > 8192:
        raise ValueError(f"{M} slots of {DK} and {DV} numbers do not fit one program")
    spans = triton.cdiv(T, SPAN)
    o = torch.empty_like(v)
    p = torch.empty(g.shape, device=g.device, dtype=torch.float32)
    saved_k, saved_v = p.new_empty((B, H, spans, M, DK)), p.new_empty((B, H, spans, M, DV))
    slot_attention_kernel[(B * H,)](
        q, k, v, g, o, p, saved_k, saved_v, T, M, DK, DV, spans, **tiling(q, v, g)
    )
    return o, p, saved_k, saved_v


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gated_slot_attention(q, k, v, g):
    """q, k: (B, H, T, DK); v: (B, H, T, DV); g: (B, H, T, M), the logarithms of the gates, at most 0."""
    return slot_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())[0]


def reference(q, k, v, g):
    (B, H, T, DK), DV, M = q.shape, v.shape[3], g.shape[3]
    K, V, steps = q.new_zeros(B, H, M, DK), q.new_zeros(B, H, M, DV), []
    for t in range(T):
        a = g[:, :, t, :, None].exp()
        K = a * K + (1 - a) * k[:, :, t, None]
        V = a * V + (1 - a) * v[:, :, t, None]
        p = torch.softmax((K * q[:, :, t, None]).sum(-1), dim=-1)
        steps.append((V * p[..., None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 16, "H": 8, "T": 1024, "M": 64, "DK": 64, "DV": 64},
    {"B": 8, "H": 4, "T": 501, "M": 48, "DK": 128, "DV": 100},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "T": 19, "M": 8, "DK": 16, "DV": 12},
    {"B": 2, "H": 1, "T": 16, "M": 5, "DK": 9, "DV": 16},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, M, DK, DV = (dims[name] for name in ("B", "H", "T", "M", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    return q, k, v, torch.nn.functional.logsigmoid(1 + torch.randn(B, H, T, M, device=device, dtype=dtype))


# ---- backward ----


@triton.jit
def slot_attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, p_ptr, saved_k_ptr, saved_v_ptr, do_ptr, scratch_k_ptr, scratch_v_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, T, M, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    scratch_k_ptr += head * SPAN * M * DK
    scratch_v_ptr += head * SPAN * M * DV
    X = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    Y = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        span = head * spans + start // SPAN
        K = load_memory(saved_k_ptr + span * M * DK, m, d, M, DK)
        V = load_memory(saved_v_ptr + span * M * DV, m, e, M, DV)
        for i in range(length):  # both memories before every step of the span
            step = head * T + start + i
            store_memory(scratch_k_ptr + i * M * DK, K, m, d, M, DK)
            store_memory(scratch_v_ptr + i * M * DV, V, m, e, M, DV)
            a = tl.exp(load_row(g_ptr + step * M, m, M))
            K = remember(K, a, load_row(k_ptr + step * DK, d, DK))
            V = remember(V, a, load_row(v_ptr + step * DV, e, DV))
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            step = head * T + start + i
            a = tl.exp(load_row(g_ptr + step * M, m, M))
            q, k = load_row(q_ptr + step * DK, d, DK), load_row(k_ptr + step * DK, d, DK)
            v, do = load_row(v_ptr + step * DV, e, DV), load_row(do_ptr + step * DV, e, DV)
            p = load_row(p_ptr + step * M, m, M)
            K_before = load_memory(scratch_k_ptr + i * M * DK, m, d, M, DK)
            V_before = load_memory(scratch_v_ptr + i * M * DV, m, e, M, DV)
            dp = tl.sum(remember(V_before, a, v) * do[None, :], axis=1)
            dp -= tl.sum(p * dp, axis=0)
            w = p * (dp - tl.sum(p * dp, axis=0))  # again: the sum of w is 0, see above
            X += p[:, None] * do[None, :]
            Y += w[:, None] * q[None, :]
            dq = tl.sum(remember(K_before, a, k) * w[:, None], axis=0)
            store_row(dq_ptr + step * DK, dq, d, DK)
            store_row(dk_ptr + step * DK, tl.sum(Y * (1 - a)[:, None], axis=0), d, DK)
            store_row(dv_ptr + step * DV, tl.sum(X * (1 - a)[:, None], axis=0), e, DV)
            da = tl.sum(X * (V_before - v[None, :]), axis=1) + tl.sum(Y * (K_before - k[None, :]), axis=1)
            store_row(dg_ptr + step * M, a * da, m, M)
            X *= a[:, None]
            Y *= a[:, None]
        tl.debug_barrier()  # and the next span overwrites it


class GatedSlotAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g):
        q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
        o, p, saved_k, saved_v = slot_attention_forward(q, k, v, g)
        ctx.save_for_backward(q, k, v, g, p, saved_k, saved_v)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, g, p, saved_k, saved_v = ctx.saved_tensors
        (B, H, T, DK), DV, M, spans = q.shape, v.shape[3], g.shape[3], saved_k.shape[2]
        grads = tuple(torch.empty_like(tensor) for tensor in (q, k, v, g))
        scratch_k, scratch_v = p.new_empty((B * H, SPAN, M, DK)), p.new_empty((B * H, SPAN, M, DV))
        slot_attention_backward_kernel[(B * H,)](
            q, k, v, g, p, saved_k, saved_v, do.contiguous(), scratch_k, scratch_v, *grads,
            T, M, DK, DV, spans, **tiling(q, v, g),
        )  # fmt: skip
        needs = zip(grads, ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in needs)


def gated_slot_attention_autograd(q, k, v, g):
    return GatedSlotAttention.apply(q, k, v, g)
