"""DeltaProduct: several delta-rule updates a token; a walk back, then a walk forward, and no state is kept.

Forward    a token has n keys, values and step sizes; with S the state after the token before, in turn
           e_j = v_j - S^T k_j,   S <- S + b_j k_j e_j^T   for j = 1 .. n,   and then  o = S^T q
           (the product of n generalised Householder matrices acts on S; b up to 2 makes them reflections)
Backward   G is the gradient of S, from this token's output and all later ones:  G <- G + q do^T,
           and for j = n .. 1:   de_j = b_j G^T k_j = dv_j,   db_j = <k_j, G e_j>,   G <- G - k_j de_j^T;
           dq = S do;   dk_j = b_j G e_j - P_j de_j,  with P_j the state before update j

Forward schedule: a program owns (head, tile of value columns), which never mix; the tile stays in registers
for all of time. It stores every e_j, as large as v, and nothing else.
Backward schedule: the recurrence of G has no S in it, and with e kept that of S has no G: only de has to pass
from one to the other, a vector an update. So the owner walks time twice. From the right it carries G, and
stores de, db and the first term of dk; then from the left it makes S once more, as the forward did but
without a product for e, and adds what needs S: dq and the second term. No checkpoints of D x D and no
scratch to walk a span in, and nothing is undone by subtraction, which is exact in theory and lost when a long
key overwrites the state. A barrier stands between the walks. dv is the tile's own; dq, dk and db are sums
over value columns: each tile has a slot, and a second kernel adds the slots.

op: delta_product
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_V = 16


@triton.jit
def load_row(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def delta_product_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, o_ptr, e_ptr, T, DK, DV,
    N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for t in range(T):
        token = head * T + t
        for j in tl.static_range(N):
            step = token * N + j
            k, v = load_row(k_ptr + step * DK, d, DK), load_row(v_ptr + step * DV, c, DV)
            e = v - tl.sum(state * k[:, None], axis=0)
            state += k[:, None] * (tl.load(beta_ptr + step).to(tl.float32) * e)[None, :]
            tl.store(e_ptr + step * DV + c, e, mask=c < DV)
        o = tl.sum(state * load_row(q_ptr + token * DK, d, DK)[:, None], axis=0)
        tl.store(o_ptr + token * DV + c, o.to(o_ptr.dtype.element_ty), mask=c < DV)


def delta_product_forward(q, k, v, beta):
    (B, H, T, DK), N, DV = q.shape, k.shape[3], v.shape[4]
    if k.shape != (B, H, T, N, DK) or v.shape[:4] != k.shape[:4] or beta.shape != k.shape[:4]:
        raise ValueError("k, v and beta must agree in their first four sizes, and k with q in width")
    if DK > 256 or N > 4:
        raise ValueError(f"{N} updates of key dimension {DK} do not fit one program")
    o = torch.empty((B, H, T, DV), device=v.device, dtype=v.dtype)
    e = torch.empty(v.shape, device=v.device, dtype=torch.float32)
    delta_product_kernel[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, beta, o, e, T, DK, DV, N, BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V
    )
    return o, e


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def delta_product(q, k, v, beta):
    """q: (B, H, T, DK); k: (B, H, T, N, DK), rows of about unit length; v: (.., N, DV); beta: (.., N)."""
    return delta_product_forward(*(tensor.contiguous() for tensor in (q, k, v, beta)))[0]


def reference(q, k, v, beta):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[4]), []
    for t in range(q.shape[2]):
        for j in range(k.shape[3]):
            key = k[:, :, t, j, :, None]
            error = v[:, :, t, j] - (state * key).sum(2)
            state = state + beta[:, :, t, j, None, None] * key * error[:, :, None, :]
        steps.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 4, "H": 8, "T": 1024, "N": 2, "DK": 128, "DV": 128},
    {"B": 1, "H": 8, "T": 501, "N": 3, "DK": 64, "DV": 96},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "T": 13, "N": 2, "DK": 16, "DV": 20},
    {"B": 2, "H": 1, "T": 8, "N": 3, "DK": 11, "DV": 16},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, N, DK, DV = (dims[name] for name in ("B", "H", "T", "N", "DK", "DV"))
    q = torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5
    k = torch.randn(B, H, T, N, DK, device=device, dtype=dtype)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(B, H, T, N, DV, device=device, dtype=dtype)
    return q, k, v, 2 * torch.rand(B, H, T, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_product_backward_kernel(
    q_ptr, k_ptr, beta_ptr, e_ptr, do_ptr, de_ptr, dv_ptr, dq_slots_ptr, dk_slots_ptr, dbeta_slots_ptr,
    T, DK, DV, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    first_slot = (tl.program_id(0) * tl.num_programs(1) + head) * T
    grad = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)  # G
    for back in range(T):
        t = T - 1 - back
        token = head * T + t
        do = load_row(do_ptr + token * DV, c, DV)
        grad += load_row(q_ptr + token * DK, d, DK)[:, None] * do[None, :]
        for i in tl.static_range(N):
            step, slot = token * N + N - 1 - i, (first_slot + t) * N + N - 1 - i
            k, e = load_row(k_ptr + step * DK, d, DK), load_row(e_ptr + step * DV, c, DV)
            beta = tl.load(beta_ptr + step).to(tl.float32)
            de = beta * tl.sum(grad * k[:, None], axis=0)
            tl.store(de_ptr + step * DV + c, de, mask=c < DV)
            grad_e = tl.sum(grad * e[None, :], axis=1)
            tl.store(dbeta_slots_ptr + slot, tl.sum(k * grad_e))
            tl.store(dk_slots_ptr + slot * DK + d, beta * grad_e, mask=d < DK)
            grad -= k[:, None] * de[None, :]
    tl.debug_barrier()  # the walk forward reads what the walk back stored

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)  # P and S
    for t in range(T):
        token = head * T + t
        for j in tl.static_range(N):
            step, slot = token * N + j, (first_slot + t) * N + j
            k, e = load_row(k_ptr + step * DK, d, DK), load_row(e_ptr + step * DV, c, DV)
            de = load_row(de_ptr + step * DV, c, DV)
            tl.store(dv_ptr + step * DV + c, de.to(dv_ptr.dtype.element_ty), mask=c < DV)
            dk = load_row(dk_slots_ptr + slot * DK, d, DK) - tl.sum(state * de[None, :], axis=1)
            tl.store(dk_slots_ptr + slot * DK + d, dk, mask=d < DK)
            state += k[:, None] * (tl.load(beta_ptr + step).to(tl.float32) * e)[None, :]
        do = load_row(do_ptr + token * DV, c, DV)
        tl.store(dq_slots_ptr + (first_slot + t) * DK + d, tl.sum(state * do[None, :], axis=1), mask=d < DK)


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


class DeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta):
        q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
        o, e = delta_product_forward(q, k, v, beta)
        ctx.save_for_backward(q, k, beta, e)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, beta, e = ctx.saved_tensors
        (B, H, T, DK), N, DV = q.shape, k.shape[3], e.shape[4]
        tiles, needs = triton.cdiv(DV, BLOCK_V), ctx.needs_input_grad
        de, dv = torch.empty_like(e), torch.empty(e.shape, device=e.device, dtype=do.dtype)
        dq, dk, dbeta = (e.new_empty((tiles, *tensor.shape)) for tensor in (q, k, beta))
        delta_product_backward_kernel[(tiles, B * H)](
            q, k, beta, e, do.contiguous(), de, dv, dq, dk, dbeta, T, DK, DV, N,
            BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V,
        )  # fmt: skip
        return (
            sum_slots(dq, q) if needs[0] else None,
            sum_slots(dk, k) if needs[1] else None,
            dv if needs[2] else None,
            sum_slots(dbeta, beta) if needs[3] else None,
        )


def delta_product_autograd(q, k, v, beta):
    return DeltaProduct.apply(q, k, v, beta)
