"""RWKV-6 time mixing: a decay for each channel and step, and a bonus for the current token.

Forward    o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t,   S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T
Backward   with z_t = <v_t, do_t> and G_t the gradient of S_t, from the outputs after t:
           G_{t-1} = diag(e^{w_t}) G_t + r_t do_t^T;   p_t = S_{t-1} do_t,  m_t = G_t v_t:
           dr_t = p_t + z_t u * k_t,   dk_t = m_t + z_t u * r_t,   du = sum_t z_t r_t * k_t,
           dv_t = G_t^T k_t + <r_t, u * k_t> do_t,   dw_t = e^{w_t} * rowsum(G_t * S_{t-1}).
           By the two recurrences rowsum(G_t * S_t) is both dw_t + k_t * m_t and dw_{t+1} + r_{t+1} * p_{t+1}:
           dw_t = dw_{t+1} + r_{t+1} * p_{t+1} - k_t * m_t

Forward schedule: a program owns (head, tile of value columns), which never mix, and walks time with its tile
of S in registers. Nothing but the output is stored.
Backward schedule: dr needs S, dk and dv need G, and only dw seems to need both at once. Its recurrence is the
way out: one kernel walks forward with S, storing p, and then backward with G, and no state is stored for
every step, nor does anything divide by e^{w}. What rounding leaves of the differences would add up over time,
so at every SPAN-th step the walk forward leaves S, and the walk backward makes dw anew from rowsum(G * S). A
barrier parts the walks. dv is a tile's own; dr, dk, dw and du are sums over value columns: each tile has a
slot, and a second kernel adds the slots.

op: rwkv6
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
def rwkv6_kernel(
    r_ptr, k_ptr, v_ptr, w_ptr, u_ptr, o_ptr, T, H, DK, DV, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    u = load_row(u_ptr + head % H * DK, d, DK)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for t in range(T):
        step = head * T + t
        r, k = load_row(r_ptr + step * DK, d, DK), load_row(k_ptr + step * DK, d, DK)
        v, w = load_row(v_ptr + step * DV, e, DV), load_row(w_ptr + step * DK, d, DK)
        o = tl.sum(state * r[:, None], axis=0) + tl.sum(r * u * k, axis=0) * v
        tl.store(o_ptr + step * DV + e, o.to(o_ptr.dtype.element_ty), mask=e < DV)
        state = tl.exp(w)[:, None] * state + k[:, None] * v[None, :]


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def rwkv6(r, k, v, w, u):
    """r, k, w: (B, H, T, DK), w the logarithm of the decay; v: (B, H, T, DV); u: (H, DK)."""
    r, k, v, w, u = (tensor.contiguous() for tensor in (r, k, v, w, u))
    (B, H, T, DK), DV = r.shape, v.shape[3]
    if not r.shape == k.shape == w.shape or v.shape[:3] != r.shape[:3] or u.shape != (H, DK):
        raise ValueError("r, k and w, v and u must agree in batch, heads, time and key channels")
    if DK > 256:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    o = torch.empty_like(v)
    rwkv6_kernel[(triton.cdiv(DV, BLOCK_V), B * H)](
        r, k, v, w, u, o, T, H, DK, DV, BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V
    )
    return o


def reference(r, k, v, w, u):
    state, steps = r.new_zeros(*r.shape[:2], r.shape[3], v.shape[3]), []
    for t in range(r.shape[2]):
        kv = k[:, :, t, :, None] * v[:, :, t, None, :]
        steps.append(((state + u[:, :, None] * kv) * r[:, :, t, :, None]).sum(2))
        state = w[:, :, t, :, None].exp() * state + kv
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 4, "H": 32, "T": 512, "DK": 64, "DV": 64},
    {"B": 1, "H": 12, "T": 1021, "DK": 64, "DV": 50},
]
SWEEP_CPU = [{"B": 2, "H": 1, "T": 19, "DK": 11, "DV": 20}, {"B": 1, "H": 2, "T": 5, "DK": 16, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    r, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.25 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    w = -torch.exp(torch.randn_like(r) - 2)
    return r, k, v, w, torch.randn(H, DK, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def rwkv6_backward_kernel(
    r_ptr, k_ptr, v_ptr, w_ptr, u_ptr, do_ptr, border_ptr,
    dv_ptr, dr_slots_ptr, dk_slots_ptr, dw_slots_ptr, du_slots_ptr, T, H, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * tl.num_programs(1) + head
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = d[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    u = load_row(u_ptr + head % H * DK, d, DK)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for t in range(T):
        step = head * T + t
        k, v = load_row(k_ptr + step * DK, d, DK), load_row(v_ptr + step * DV, e, DV)
        w, do = load_row(w_ptr + step * DK, d, DK), load_row(do_ptr + step * DV, e, DV)
        dr = tl.sum(state * do[None, :], axis=1) + tl.sum(v * do, axis=0) * u * k
        tl.store(dr_slots_ptr + (slot * T + t) * DK + d, dr, mask=d < DK)
        state = tl.exp(w)[:, None] * state + k[:, None] * v[None, :]
        if t % SPAN == SPAN - 1:
            tl.store(border_ptr + (slot * spans + t // SPAN) * BLOCK_K * BLOCK_V + in_tile, state)
    tl.debug_barrier()  # the walk back reads what the walk forward stored

    grad = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)  # G_t
    crossing = tl.zeros([BLOCK_K], dtype=tl.float32)  # rowsum(G_t * S_t)
    du = tl.zeros([BLOCK_K], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        step = head * T + t
        if t % SPAN == SPAN - 1:
            border = tl.load(border_ptr + (slot * spans + t // SPAN) * BLOCK_K * BLOCK_V + in_tile)
            crossing = tl.sum(grad * border, axis=1)
        r, k = load_row(r_ptr + step * DK, d, DK), load_row(k_ptr + step * DK, d, DK)
        v, w = load_row(v_ptr + step * DV, e, DV), load_row(w_ptr + step * DK, d, DK)
        do = load_row(do_ptr + step * DV, e, DV)
        z = tl.sum(v * do, axis=0)
        m = tl.sum(grad * v[None, :], axis=1)
        p = load_row(dr_slots_ptr + (slot * T + t) * DK, d, DK) - z * u * k
        dv = tl.sum(grad * k[:, None], axis=0) + tl.sum(r * u * k, axis=0) * do
        tl.store(dv_ptr + step * DV + e, dv.to(dv_ptr.dtype.element_ty), mask=e < DV)
        tl.store(dk_slots_ptr + (slot * T + t) * DK + d, m + z * u * r, mask=d < DK)
        dw = crossing - k * m
        tl.store(dw_slots_ptr + (slot * T + t) * DK + d, dw, mask=d < DK)
        du += z * r * k
        crossing = dw + r * p
        grad = tl.exp(w)[:, None] * grad + r[:, None] * do[None, :]
    tl.store(du_slots_ptr + slot * DK + d, du, mask=d < DK)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


def sum_slots(slots, like):
    """Slots of like's size, one after another, into one tensor."""
    out, size = torch.empty_like(like), like.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.numel() // size, size, BLOCK=256)
    return out


class Rwkv6(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        ctx.save_for_backward(*inputs)
        return rwkv6(*inputs)

    @staticmethod
    def backward(ctx, do):
        r, k, v, w, u = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, DK), DV = r.shape, v.shape[3]
        tiles, spans, BLOCK_K = triton.cdiv(DV, BLOCK_V), triton.cdiv(T, SPAN), triton.next_power_of_2(DK)
        options = {"device": r.device, "dtype": torch.float32}
        border = torch.empty((tiles, B, H, spans, BLOCK_K, BLOCK_V), **options)
        dr, dk, dw = (torch.empty((tiles, *r.shape), **options) for _ in range(3))
        dv, du = torch.empty_like(v), torch.empty((tiles, B, H, DK), **options)
        rwkv6_backward_kernel[(tiles, B * H)](
            r, k, v, w, u, do, border, dv, dr, dk, dw, du, T, H, DK, DV, spans,
            SPAN=SPAN, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V,
        )  # fmt: skip
        needs = ctx.needs_input_grad
        return (
            sum_slots(dr, r) if needs[0] else None,
            sum_slots(dk, k) if needs[1] else None,
            dv if needs[2] else None,
            sum_slots(dw, w) if needs[3] else None,
            sum_slots(du, u) if needs[4] else None,
        )


def rwkv6_autograd(r, k, v, w, u):
    return Rwkv6.apply(r, k, v, w, u)
