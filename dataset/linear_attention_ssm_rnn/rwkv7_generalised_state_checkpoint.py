"""RWKV-7 time mixing: the state is decayed by channel and moved by a rank-one transition, both data's choice.

Forward    S_t = S_{t-1} (diag(e^{w_t}) + a_t b_t^T) + v_t k_t^T,   o_t = S_t r_t      (S is Dv x Dk)
           that is, with s_t = S_{t-1} a_t:   S_t = S_{t-1} diag(e^{w_t}) + s_t b_t^T + v_t k_t^T
Backward   G_t is the gradient of S_t from the outputs from t on:   G = carry + do_t r_t^T,
           dr_t = S_t^T do_t,   dv_t = G k_t,   dk_t = G^T v_t,   ds_t = G b_t,   db_t = G^T s_t,
           da_t = S_{t-1}^T ds_t,   dw_t = e^{w_t} * colsum(G * S_{t-1}),
           carry = G diag(e^{w_t}) + ds_t a_t^T

Forward schedule: a program owns a head with the whole state in registers, walks time, and stores the state
before every SPAN-th step.
Backward schedule: the transition cannot be undone (e^{w} may be tiny, and the rank-one part singular), so
each span is walked forward once more from its stored state, S_{t-1} of each step going to a scratch of the
program that stays in cache, and then back with G in registers. Five of the six gradients are sums over value
rows, the sixth over key columns: the owner of the whole state has every sum at hand, so all six are stored
once, without slots, a second kernel or atomics. Tiles of rows would be more programs; at the usual 64 x 64 a
state of 32 registers a thread is no reason to cut it, and a batch of heads fills the device. S_t is not read:
it is one step from S_{t-1}, whose terms are at hand.

op: rwkv7
schedule: reverse_scan, chunk_state_pass, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPAN = 16


@triton.jit
def load_row(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, i, size):
    tl.store(ptr + i, value.to(ptr.dtype.element_ty), mask=i < size)


@triton.jit
def rwkv7_kernel(
    r_ptr, w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, o_ptr, saved_ptr, T, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    e, d = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    in_state = (e[:, None] < DV) & (d[None, :] < DK)
    state = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    for t in range(T):
        if t % SPAN == 0:
            saved = saved_ptr + (head * spans + t // SPAN) * DV * DK
            tl.store(saved + e[:, None] * DK + d[None, :], state, mask=in_state)
        row = (head * T + t) * DK
        r, w, k = load_row(r_ptr + row, d, DK), load_row(w_ptr + row, d, DK), load_row(k_ptr + row, d, DK)
        a, b = load_row(a_ptr + row, d, DK), load_row(b_ptr + row, d, DK)
        v = load_row(v_ptr + (head * T + t) * DV, e, DV)
        s = tl.sum(state * a[None, :], axis=1)
        state = state * tl.exp(w)[None, :] + s[:, None] * b[None, :] + v[:, None] * k[None, :]
        store_row(o_ptr + (head * T + t) * DV, tl.sum(state * r[None, :], axis=1), e, DV)


def rwkv7_forward(r, w, k, v, a, b):
    (B, H, T, DK), DV = r.shape, v.shape[3]
    if not r.shape == w.shape == k.shape == a.shape == b.shape or v.shape[:3] != r.shape[:3]:
        raise ValueError("r, w, k, a and b must have one shape, and v its batch, heads and time")
    BLOCK_K, BLOCK_V = triton.next_power_of_2(DK), triton.next_power_of_2(DV)
    if BLOCK_K * BLOCK_V > 128 * 128:
        raise ValueError(f"a state of {DV} x {DK} does not fit one program")
    spans = triton.cdiv(T, SPAN)
    o = torch.empty_like(v)
    saved = torch.empty((B, H, spans, DV, DK), device=r.device, dtype=torch.float32)
    rwkv7_kernel[(B * H,)](
        r, w, k, v, a, b, o, saved, T, DK, DV, spans, SPAN=SPAN, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V
    )
    return o, saved


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def rwkv7(r, w, k, v, a, b):
    """r, w, k, a, b: (B, H, T, DK), w the logarithm of the decay; v: (B, H, T, DV)."""
    return rwkv7_forward(*(tensor.contiguous() for tensor in (r, w, k, v, a, b)))[0]


def reference(r, w, k, v, a, b):
    state, steps = r.new_zeros(*r.shape[:2], v.shape[3], r.shape[3]), []
    for t in range(r.shape[2]):
        r_t, w_t, k_t, a_t, b_t = (tensor[:, :, t, None, :] for tensor in (r, w, k, a, b))
        s = (state * a_t).sum(-1, keepdim=True)
        state = state * w_t.exp() + s * b_t + v[:, :, t, :, None] * k_t
        steps.append((state * r_t).sum(-1))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 4, "H": 32, "T": 512, "DK": 64, "DV": 64},
    {"B": 2, "H": 12, "T": 1021, "DK": 64, "DV": 50},
]
SWEEP_CPU = [{"B": 2, "H": 1, "T": 19, "DK": 11, "DV": 9}, {"B": 1, "H": 2, "T": 5, "DK": 16, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    r, k, key = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5 for _ in range(3))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    w = -0.6 * torch.sigmoid(torch.randn_like(r))
    key = torch.nn.functional.normalize(key, dim=-1)  # what is removed, and its replacement rate
    return r, w, k, v, -key, key * torch.sigmoid(torch.randn_like(r))


# ---- backward ----


@triton.jit
def rwkv7_backward_kernel(
    r_ptr, w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, saved_ptr, do_ptr, scratch_ptr,
    dr_ptr, dw_ptr, dk_ptr, dv_ptr, da_ptr, db_ptr, T, DK, DV, spans,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    e, d = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    in_state = (e[:, None] < DV) & (d[None, :] < DK)
    in_tile = e[:, None] * BLOCK_K + d[None, :]
    scratch = scratch_ptr + head * SPAN * BLOCK_V * BLOCK_K
    carry = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    for back in range(spans):
        start = (spans - 1 - back) * SPAN
        length = tl.minimum(SPAN, T - start)
        saved = saved_ptr + (head * spans + start // SPAN) * DV * DK
        state = tl.load(saved + e[:, None] * DK + d[None, :], mask=in_state, other=0.0)
        for i in range(length):
            tl.store(scratch + i * BLOCK_V * BLOCK_K + in_tile, state)
            row = (head * T + start + i) * DK
            w, k = load_row(w_ptr + row, d, DK), load_row(k_ptr + row, d, DK)
            a, b = load_row(a_ptr + row, d, DK), load_row(b_ptr + row, d, DK)
            v = load_row(v_ptr + (head * T + start + i) * DV, e, DV)
            s = tl.sum(state * a[None, :], axis=1)
            state = state * tl.exp(w)[None, :] + s[:, None] * b[None, :] + v[:, None] * k[None, :]
        tl.debug_barrier()  # the walk back reads what the walk forward stored
        for i in range(length - 1, -1, -1):
            row = (head * T + start + i) * DK
            r, w, k = load_row(r_ptr + row, d, DK), load_row(w_ptr + row, d, DK), load_row(k_ptr + row, d, DK)
            a, b = load_row(a_ptr + row, d, DK), load_row(b_ptr + row, d, DK)
            v = load_row(v_ptr + (head * T + start + i) * DV, e, DV)
            do = load_row(do_ptr + (head * T + start + i) * DV, e, DV)
            before = tl.load(scratch + i * BLOCK_V * BLOCK_K + in_tile)
            s = tl.sum(before * a[None, :], axis=1)
            state = before * tl.exp(w)[None, :] + s[:, None] * b[None, :] + v[:, None] * k[None, :]
            store_row(dr_ptr + row, tl.sum(state * do[:, None], axis=0), d, DK)

            grad = carry + do[:, None] * r[None, :]
            store_row(dv_ptr + (head * T + start + i) * DV, tl.sum(grad * k[None, :], axis=1), e, DV)
            store_row(dk_ptr + row, tl.sum(grad * v[:, None], axis=0), d, DK)
            store_row(db_ptr + row, tl.sum(grad * s[:, None], axis=0), d, DK)
            ds = tl.sum(grad * b[None, :], axis=1)
            store_row(da_ptr + row, tl.sum(before * ds[:, None], axis=0), d, DK)
            store_row(dw_ptr + row, tl.exp(w) * tl.sum(grad * before, axis=0), d, DK)
            carry = grad * tl.exp(w)[None, :] + ds[:, None] * a[None, :]
        tl.debug_barrier()  # and the next span overwrites it


class Rwkv7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        o, saved = rwkv7_forward(*inputs)
        ctx.save_for_backward(*inputs, saved)
        return o

    @staticmethod
    def backward(ctx, do):
        *inputs, saved = ctx.saved_tensors
        B, H, T, DK = inputs[0].shape
        DV, spans = saved.shape[3], saved.shape[2]
        BLOCK_K, BLOCK_V = triton.next_power_of_2(DK), triton.next_power_of_2(DV)
        scratch = saved.new_empty((B * H, SPAN, BLOCK_V, BLOCK_K))
        grads = [torch.empty_like(tensor) for tensor in inputs]
        rwkv7_backward_kernel[(B * H,)](
            *inputs, saved, do.contiguous(), scratch, *grads, T, DK, DV, spans,
            SPAN=SPAN, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V,
        )  # fmt: skip
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def rwkv7_autograd(r, w, k, v, a, b):
    return Rwkv7.apply(r, w, k, v, a, b)
