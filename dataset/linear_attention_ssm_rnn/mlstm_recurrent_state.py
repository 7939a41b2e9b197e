"""mLSTM step by step: a matrix memory with a normaliser that is floored at 1.

Forward    C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t,   f = sigmoid(a_f),  i = e^{a_i},
           b_t = <n_t, q_t>,   d_t = max(|b_t|, 1),   h_t = C_t^T q_t / d_t     (C: Dk x Dv; scale q outside)
Backward   e_t = dh_t / d_t,   db_t = -sign(b_t) <dh_t, h_t> / d_t where |b_t| > 1, else 0;
           with G, g the gradients of C_t, n_t from the outputs from t on:
           G = carry + q_t e_t^T,  g = carry' + db_t q_t;   dq_t = C_t e_t + db_t n_t,   m_t = G v_t + g,
           dk_t = i_t m_t,   dv_t = i_t G^T k_t,   da_i = i_t <k_t, m_t>;   the carries are f_t G and f_t g.
           The forget gate has da_f = (1 - f_t) F_t,  F_t = f_t (<G, C_{t-1}> + <g, n_{t-1}>).  By the
           recurrences <G, C_t> + <g, n_t> is both F_t + da_i and F_{t+1} + <q_t, dq_t>:
           F_t = F_{t+1} + <q_t, dq_t> - da_i

Forward schedule: a program owns (head, tile of value columns); columns of C do not mix, so the tile stays in
registers over time. n is as good as one more column: every tile carries it, since every tile divides by d.
Backward schedule: dq needs C, all else G, and only the forget gate seems to need both at a time; F is its way
out. A walk forward makes dq, a walk back the rest, no state is kept for every step, and none is divided by a
gate. What rounding leaves in F would grow along time, so the walk forward leaves C and n at every SPAN-th
step, where the walk back makes F anew. <dh, h> runs over all columns and comes from a kernel before; db is
given to the first tile alone, with it g and n's part of dq, so that they count once. dv is a tile's own, the
rest are slots of the tiles, added by a last kernel.

op: mlstm
schedule: reverse_scan, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_V = 16
SPAN = 16


@triton.jit
def load_row(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def load_gates(ai_ptr, af_ptr, step):
    return tl.exp(tl.load(ai_ptr + step).to(tl.float32)), tl.sigmoid(tl.load(af_ptr + step).to(tl.float32))


@triton.jit
def mlstm_kernel(
    q_ptr, k_ptr, v_ptr, ai_ptr, af_ptr, h_ptr, b_ptr, T, DK, DV, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    x = tl.arange(0, BLOCK_K)
    y = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    C = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    n = tl.zeros([BLOCK_K], dtype=tl.float32)
    for t in range(T):
        step = head * T + t
        q, k = load_row(q_ptr + step * DK, x, DK), load_row(k_ptr + step * DK, x, DK)
        i, f = load_gates(ai_ptr, af_ptr, step)
        C = f * C + (i * k)[:, None] * load_row(v_ptr + step * DV, y, DV)[None, :]
        n = f * n + i * k
        b = tl.sum(n * q, axis=0)
        size = tl.where(b < 0, -b, b)
        h = tl.sum(C * q[:, None], axis=0) / tl.where(size > 1, size, 1.0)
        tl.store(h_ptr + step * DV + y, h.to(h_ptr.dtype.element_ty), mask=y < DV)
        if tl.program_id(0) == 0:
            tl.store(b_ptr + step, b)


def mlstm_forward(q, k, v, ai, af):
    (B, H, T, DK), DV = q.shape, v.shape[3]
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or not ai.shape == af.shape == q.shape[:3]:
        raise ValueError("q and k, v and the gates must agree in batch, heads and time")
    if DK > 256:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    h, b = torch.empty_like(v), torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    mlstm_kernel[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, ai, af, h, b, T, DK, DV, BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V
    )
    return h, b


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def mlstm(q, k, v, ai, af):
    """q, k: (B, H, T, DK); v: (B, H, T, DV); ai, af: (B, H, T), gates before exp and sigmoid."""
    return mlstm_forward(*(tensor.contiguous() for tensor in (q, k, v, ai, af)))[0]


def reference(q, k, v, ai, af):
    C, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    n = q.new_zeros(*q.shape[:2], q.shape[3])
    for t in range(q.shape[2]):
        i, f = ai[:, :, t, None].exp(), torch.sigmoid(af[:, :, t, None])
        C = f[..., None] * C + (i * k[:, :, t])[..., None] * v[:, :, t, None, :]
        n = f * n + i * k[:, :, t]
        d = (n * q[:, :, t]).sum(-1, keepdim=True).abs().clamp(min=1)
        steps.append((C * q[:, :, t, :, None]).sum(2) / d)
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 4, "H": 16, "T": 512, "DK": 64, "DV": 64},
    {"B": 1, "H": 4, "T": 1021, "DK": 128, "DV": 100},
]
SWEEP_CPU = [{"B": 2, "H": 1, "T": 19, "DK": 11, "DV": 20}, {"B": 1, "H": 2, "T": 5, "DK": 16, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.25 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    ai, af = (torch.randn(B, H, T, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, ai - 1, af + 3


# ---- backward ----


@triton.jit
def normaliser_kernel(h_ptr, dh_ptr, b_ptr, rd_ptr, db_ptr, DV, BLOCK: tl.constexpr):
    """1 / d and db of a step."""
    step = tl.program_id(0).to(tl.int64)
    y = tl.arange(0, BLOCK)
    delta = tl.sum(load_row(h_ptr + step * DV, y, DV) * load_row(dh_ptr + step * DV, y, DV), axis=0)
    b = tl.load(b_ptr + step)
    size = tl.where(b < 0, -b, b)
    tl.store(rd_ptr + step, 1.0 / tl.where(size > 1, size, 1.0))
    tl.store(db_ptr + step, tl.where(size > 1, -delta / b, 0.0))  # sign(b) / d = 1 / b


@triton.jit
def walks_kernel(
    q_ptr, k_ptr, v_ptr, ai_ptr, af_ptr, rd_ptr, db_ptr, dh_ptr, C_ptr, n_ptr,
    dv_ptr, dq_slots_ptr, dk_slots_ptr, dai_slots_ptr, daf_slots_ptr, T, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * tl.num_programs(1) + head
    first = tl.where(tl.program_id(0) == 0, 1.0, 0.0)
    x = tl.arange(0, BLOCK_K)
    y = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = x[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    C = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    n = tl.zeros([BLOCK_K], dtype=tl.float32)
    for t in range(T):
        step = head * T + t
        k, v = load_row(k_ptr + step * DK, x, DK), load_row(v_ptr + step * DV, y, DV)
        e = load_row(dh_ptr + step * DV, y, DV) * tl.load(rd_ptr + step)
        i, f = load_gates(ai_ptr, af_ptr, step)
        C = f * C + (i * k)[:, None] * v[None, :]
        n = f * n + i * k
        dq = tl.sum(C * e[None, :], axis=1) + first * tl.load(db_ptr + step) * n
        tl.store(dq_slots_ptr + (slot * T + t) * DK + x, dq, mask=x < DK)
        if t % SPAN == SPAN - 1:
            border = slot * spans + t // SPAN
            tl.store(C_ptr + border * BLOCK_K * BLOCK_V + in_tile, C)
            tl.store(n_ptr + border * BLOCK_K + x, n)
    tl.debug_barrier()  # the walk back reads what the walk forward stored

    G = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    g = tl.zeros([BLOCK_K], dtype=tl.float32)
    F = 0.0
    for back in range(T):
        t = T - 1 - back
        step, place = head * T + t, slot * T + t
        q, k = load_row(q_ptr + step * DK, x, DK), load_row(k_ptr + step * DK, x, DK)
        v = load_row(v_ptr + step * DV, y, DV)
        e = load_row(dh_ptr + step * DV, y, DV) * tl.load(rd_ptr + step)
        i, f = load_gates(ai_ptr, af_ptr, step)
        G += q[:, None] * e[None, :]
        g += first * tl.load(db_ptr + step) * q
        m = tl.sum(G * v[None, :], axis=1) + g
        dai = i * tl.sum(k * m, axis=0)
        crossing = F + tl.sum(q * load_row(dq_slots_ptr + place * DK, x, DK), axis=0)
        if t % SPAN == SPAN - 1:
            border = slot * spans + t // SPAN
            crossing = tl.sum(G * tl.load(C_ptr + border * BLOCK_K * BLOCK_V + in_tile))
            crossing += tl.sum(g * tl.load(n_ptr + border * BLOCK_K + x), axis=0)
        F = crossing - dai
        dv = i * tl.sum(G * k[:, None], axis=0)
        tl.store(dv_ptr + step * DV + y, dv.to(dv_ptr.dtype.element_ty), mask=y < DV)
        tl.store(dk_slots_ptr + place * DK + x, i * m, mask=x < DK)
        tl.store(dai_slots_ptr + place, dai)
        tl.store(daf_slots_ptr + place, (1 - f) * F)
        G *= f
        g *= f


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


def sum_slots(slots, like):
    out, size = torch.empty_like(like), like.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.shape[0], size, BLOCK=256)
    return out


class Mlstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        h, b = mlstm_forward(*inputs)
        ctx.save_for_backward(*inputs, h, b)
        return h

    @staticmethod
    def backward(ctx, dh):
        q, k, v, ai, af, h, b = ctx.saved_tensors
        dh = dh.contiguous()
        (B, H, T, DK), DV = q.shape, v.shape[3]
        tiles, spans, BLOCK_K = triton.cdiv(DV, BLOCK_V), triton.cdiv(T, SPAN), triton.next_power_of_2(DK)
        rd, db, dv = torch.empty_like(b), torch.empty_like(b), torch.empty_like(v)
        normaliser_kernel[(B * H * T,)](h, dh, b, rd, db, DV, BLOCK=triton.next_power_of_2(DV))
        C = b.new_empty((tiles, B, H, spans, BLOCK_K, BLOCK_V))
        n = b.new_empty((tiles, B, H, spans, BLOCK_K))
        dq, dk = (b.new_empty((tiles, *q.shape)) for _ in range(2))
        dai, daf = (b.new_empty((tiles, *b.shape)) for _ in range(2))
        walks_kernel[(tiles, B * H)](
            q, k, v, ai, af, rd, db, dh, C, n, dv, dq, dk, dai, daf, T, DK, DV, spans,
            SPAN=SPAN, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V,
        )  # fmt: skip
        needs = ctx.needs_input_grad
        return (
            sum_slots(dq, q) if needs[0] else None,
            sum_slots(dk, k) if needs[1] else None,
            dv if needs[2] else None,
            sum_slots(dai, ai) if needs[3] else None,
            sum_slots(daf, af) if needs[4] else None,
        )


def mlstm_autograd(q, k, v, ai, af):
    return Mlstm.apply(q, k, v, ai, af)
