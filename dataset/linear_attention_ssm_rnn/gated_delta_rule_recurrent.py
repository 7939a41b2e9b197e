"""Gated delta rule, step by step: the state forgets, and corrects what it stores under a key.

Forward    P_t = e^{g_t} S_{t-1},  e_t = v_t - P_t^T k_t,  S_t = P_t + b_t k_t e_t^T,  o_t = S_t^T q_t
           (S is Dk x Dv; g_t and b_t are scalars of a head; scale the queries and normalise the keys outside)
Backward   with G_t the gradient of S_t, from the outputs from t on:
           G = carry + q_t do_t^T,   dq_t = S_t do_t,
           de_t = b_t G^T k_t = dv_t,   db_t = <k_t, G e_t>,   dk_t = b_t G e_t - P_t de_t,
           dP = G - k_t de_t^T,   dg_t = <dP, P_t>,   carry = e^{g_t} dP

Forward schedule: a program owns (head, tile of value columns). The columns of S never mix, each is a
recurrence of its own, so the tile stays in registers for all of time; it stores e_t, and S before every
SPAN-th step.
Backward schedule: the same owners walk time backwards, a span at a time. P_t is needed at every step, and
dividing by e^{g} to run the recurrence backwards would not be stable: so a span is walked forward once more,
from its checkpoint, writing each P_t to a scratch of the program, and then back. The scratch is SPAN states
a program, not T, and stays in cache; e_t need not be made again. A barrier stands between the two walks, for
the lane that reads a number need not be the one that wrote it. dv belongs to the tile; dq, dk, db and dg are
sums over the value columns: each tile stores its share in its own slot, and a second kernel adds the slots.

op: gated_delta_rule
schedule: reverse_scan, chunk_state_pass, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPAN = 16
BLOCK_V = 16


@triton.jit
def gated_delta_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, o_ptr, e_ptr, saved_ptr, T, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (d[:, None] < DK) & (c[None, :] < DV)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            saved = saved_ptr + (head * spans + t // SPAN) * DK * DV
            tl.store(saved + d[:, None] * DV + c[None, :], state, mask=in_state)
        step = head * T + t
        q = tl.load(q_ptr + step * DK + d, mask=d < DK, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + step * DK + d, mask=d < DK, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + step * DV + c, mask=c < DV, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + step).to(tl.float32)
        state *= tl.exp(tl.load(g_ptr + step).to(tl.float32))
        e = v - tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (beta * e)[None, :]
        tl.store(e_ptr + step * DV + c, e, mask=c < DV)
        o = tl.sum(state * q[:, None], axis=0)
        tl.store(o_ptr + step * DV + c, o.to(o_ptr.dtype.element_ty), mask=c < DV)


def gated_delta_forward(q, k, v, beta, g):
    (B, H, T, DK), DV = q.shape, v.shape[3]
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or not beta.shape == g.shape == q.shape[:3]:
        raise ValueError("q and k, v, beta and g must agree in batch, heads and time")
    if DK > 256:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    spans = triton.cdiv(T, SPAN)
    o = torch.empty_like(v)
    e = torch.empty(v.shape, device=v.device, dtype=torch.float32)
    saved = torch.empty((B, H, spans, DK, DV), device=v.device, dtype=torch.float32)
    gated_delta_kernel[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, beta, g, o, e, saved, T, DK, DV, spans,
        SPAN=SPAN, BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V,
    )  # fmt: skip
    return o, e, saved


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def gated_delta_rule(q, k, v, beta, g):
    """q, k: (B, H, T, DK); v: (B, H, T, DV); beta, g: (B, H, T), g the logarithm of the gate."""
    return gated_delta_forward(*(tensor.contiguous() for tensor in (q, k, v, beta, g)))[0]


def reference(q, k, v, beta, g):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = g[:, :, t, None, None].exp() * state
        error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(2)
        state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * error[:, :, None, :]
        steps.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 2, "H": 16, "T": 1024, "DK": 128, "DV": 128},
    {"B": 1, "H": 8, "T": 501, "DK": 64, "DV": 96},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 23, "DK": 16, "DV": 20}, {"B": 2, "H": 1, "T": 32, "DK": 11, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    beta = torch.rand(B, H, T, device=device, dtype=dtype)
    return q, k, v, beta, torch.nn.functional.logsigmoid(3 + torch.randn_like(beta))


# ---- backward ----


@triton.jit
def gated_delta_backward_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, e_ptr, saved_ptr, do_ptr, scratch_ptr,
    dv_ptr, dq_slots_ptr, dk_slots_ptr, dbeta_slots_ptr, dg_slots_ptr, T, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (d[:, None] < DK) & (c[None, :] < DV)
    in_tile = d[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    scratch = scratch_ptr + (head * tl.num_programs(0) + tl.program_id(0)) * SPAN * BLOCK_K * BLOCK_V
    first_slot = (tl.program_id(0) * tl.num_programs(1) + head) * T
    carry = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        saved = saved_ptr + (head * spans + start // SPAN) * DK * DV
        state = tl.load(saved + d[:, None] * DV + c[None, :], mask=in_state, other=0.0)
        for i in range(length):  # P of every step of the span
            step = head * T + start + i
            k = tl.load(k_ptr + step * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            e = tl.load(e_ptr + step * DV + c, mask=c < DV, other=0.0)
            beta = tl.load(beta_ptr + step).to(tl.float32)
            state *= tl.exp(tl.load(g_ptr + step).to(tl.float32))
            tl.store(scratch + i * BLOCK_K * BLOCK_V + in_tile, state)
            state += k[:, None] * (beta * e)[None, :]
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            step, slot = head * T + start + i, first_slot + start + i
            q = tl.load(q_ptr + step * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + step * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            e = tl.load(e_ptr + step * DV + c, mask=c < DV, other=0.0)
            do = tl.load(do_ptr + step * DV + c, mask=c < DV, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + step).to(tl.float32)
            p = tl.load(scratch + i * BLOCK_K * BLOCK_V + in_tile)

            dq = tl.sum((p + k[:, None] * (beta * e)[None, :]) * do[None, :], axis=1)
            tl.store(dq_slots_ptr + slot * DK + d, dq, mask=d < DK)
            grad = carry + q[:, None] * do[None, :]
            de = beta * tl.sum(grad * k[:, None], axis=0)
            tl.store(dv_ptr + step * DV + c, de.to(dv_ptr.dtype.element_ty), mask=c < DV)
            grad_e = tl.sum(grad * e[None, :], axis=1)
            tl.store(dbeta_slots_ptr + slot, tl.sum(k * grad_e))
            dk = beta * grad_e - tl.sum(p * de[None, :], axis=1)
            tl.store(dk_slots_ptr + slot * DK + d, dk, mask=d < DK)
            dp = grad - k[:, None] * de[None, :]
            tl.store(dg_slots_ptr + slot, tl.sum(dp * p))
            carry = dp * tl.exp(tl.load(g_ptr + step).to(tl.float32))
        tl.debug_barrier()  # and the next span overwrites it


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


def sum_slots(slots, like):
    out = torch.empty_like(like)
    size = out.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.shape[0], size, BLOCK=256)
    return out


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, beta, g = (tensor.contiguous() for tensor in inputs)
        o, e, saved = gated_delta_forward(q, k, v, beta, g)
        ctx.save_for_backward(q, k, beta, g, e, saved)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, beta, g, e, saved = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, DK), DV, spans = q.shape, do.shape[3], saved.shape[2]
        tiles, BLOCK_K = triton.cdiv(DV, BLOCK_V), triton.next_power_of_2(DK)
        dv = torch.empty_like(do)
        scratch = saved.new_empty((B * H, tiles, SPAN, BLOCK_K, BLOCK_V))
        dq, dk = (saved.new_empty((tiles, *q.shape)) for _ in range(2))
        dbeta, dg = (saved.new_empty((tiles, *g.shape)) for _ in range(2))
        gated_delta_backward_kernel[(tiles, B * H)](
            q, k, beta, g, e, saved, do, scratch, dv, dq, dk, dbeta, dg, T, DK, DV, spans,
            SPAN=SPAN, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V,
        )  # fmt: skip
        needs = ctx.needs_input_grad
        return (
            sum_slots(dq, q) if needs[0] else None,
            sum_slots(dk, k) if needs[1] else None,
            dv if needs[2] else None,
            sum_slots(dbeta, beta) if needs[3] else None,
            sum_slots(dg, g) if needs[4] else None,
        )


def gated_delta_rule_autograd(q, k, v, beta, g):
    return GatedDeltaRule.apply(q, k, v, beta, g)
