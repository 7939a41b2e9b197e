"""Lightning attention: linear attention with a fixed decay a head, walked block by block, nothing saved.

Forward    o_i = sum_{j <= i} e^{-l (i - j)} <q_i, k_j> v_j,   l >= 0 a constant of the head.
           For a block of C rows, i and j counted from its start, and S the state before it:
           O = diag(e^{-l (i + 1)}) Q S + (Q K^T * L) V,   L_ij = e^{-l (i - j)} for j <= i, 0 elsewhere,
           S <- e^{-l C} S + K^T diag(e^{-l (C - 1 - j)}) V
Backward   R is the gradient of the state after the block, R <- e^{-l C} R + Q^T diag(e^{-l (i + 1)}) dO:
           dQ = diag(e^{-l (i + 1)}) dO S^T + (dO V^T * L) K,
           dK = diag(e^{-l (C - 1 - j)}) V R^T + (dO V^T * L)^T Q,
           dV = diag(e^{-l (C - 1 - j)}) K R + (Q K^T * L)^T dO

Forward schedule: one program a head walks the blocks with the whole of S in registers: a few dozen heads
times a batch are programs enough for a GPU, and no state ever reaches memory.
Backward schedule: dQ needs S, which is built from the left, dK and dV need R, built from the right, and
neither needs the other. So they are two roles of one launch: the programs with second coordinate 0 walk
forward with S, the others backward with R. Both run at the same time, where two walks of one program would
take twice as long, and there is no state saved, no slot and no atomic: each gradient has one writer. Powers
of the decay are made from differences of rows, none above 1. Only the inputs are kept.

op: lightning_attention
schedule: chunk_state_pass, reverse_scan
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 16 if q.dtype == torch.float32 else 32,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "num_warps": 16,
        "num_stages": 1,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled(x, weight):
    return (x.to(tl.float32) * weight[:, None]).to(x.dtype)


@triton.jit
def decayed_product(a, b, rate, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """A B^T * L of one block."""
    i = tl.arange(0, BLOCK)
    seen = i[None, :] <= i[:, None]
    decay = tl.exp(-rate * tl.where(seen, i[:, None] - i[None, :], 0).to(tl.float32))
    return tl.where(seen, tl.dot(a, tl.trans(b), input_precision=PRECISION) * decay, 0.0).to(a.dtype)


@triton.jit
def block_decays(rate, BLOCK: tl.constexpr):
    """From the state to each row, from each row to the next state, and across the block."""
    i = tl.arange(0, BLOCK)
    return tl.exp(-rate * (i + 1)), tl.exp(-rate * (BLOCK - 1 - i)), tl.exp(-rate * BLOCK)


@triton.jit
def lightning_kernel(
    q_ptr, k_ptr, v_ptr, rate_ptr, o_ptr, T, H, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * T * D
    rate = tl.load(rate_ptr + tl.program_id(0) % H)
    d = tl.arange(0, BLOCK_D)
    to_row, to_end, across = block_decays(rate, BLOCK)
    state = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head, rows, d, T, D)
        k = load_tile(k_ptr + head, rows, d, T, D)
        v = load_tile(v_ptr + head, rows, d, T, D)
        o = tl.dot(scaled(q, to_row), state.to(q.dtype), input_precision=PRECISION)
        o = tl.dot(decayed_product(q, k, rate, PRECISION, BLOCK), v, o, input_precision=PRECISION)
        store_tile(o_ptr + head, o, rows, d, T, D)
        state = tl.dot(tl.trans(scaled(k, to_end)), v, state * across, input_precision=PRECISION)


@autodiff(inputs_require_grad=(0, 1, 2))
def lightning_attention(q, k, v, rates):
    """q, k, v: (B, H, T, D); rates: float32 (H), at least 0, constants of the heads."""
    q, k, v, rates = q.contiguous(), k.contiguous(), v.contiguous(), rates.contiguous()
    B, H, T, D = q.shape
    if not q.shape == k.shape == v.shape or rates.shape != (H,):
        raise ValueError("q, k and v must have one shape, and rates one number a head")
    if D > 128:
        raise ValueError(f"a state of {D} x {D} does not fit one program")
    o = torch.empty_like(v)
    lightning_kernel[(B * H,)](q, k, v, rates, o, T, H, D, **tiling(q))
    return o


def reference(q, k, v, rates):
    i = torch.arange(q.shape[2], device=q.device)
    apart = (i[:, None] - i[None, :]).clamp(min=0)
    decay = torch.exp(-rates[:, None, None] * apart).tril().to(q.dtype)
    return ((q @ k.transpose(-1, -2)) * decay) @ v


SWEEP = [{"B": 4, "H": 32, "T": 2048, "D": 96}, {"B": 2, "H": 20, "T": 1021, "D": 64}]
SWEEP_CPU = [{"B": 1, "H": 3, "T": 41, "D": 16}, {"B": 2, "H": 1, "T": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D = (dims[name] for name in ("B", "H", "T", "D"))
    q, k = (torch.randn(B, H, T, D, device=device, dtype=dtype) / max(1, D) ** 0.25 for _ in range(2))
    rates = 2.0 ** (-8.0 * torch.arange(1, H + 1, device=device) / max(1, H))
    return q, k, torch.randn(B, H, T, D, device=device, dtype=dtype), rates


# ---- backward ----


@triton.jit
def walks_kernel(
    q_ptr, k_ptr, v_ptr, rate_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, T, H, D, first_role,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * T * D
    rate = tl.load(rate_ptr + tl.program_id(0) % H)
    i, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    to_row, to_end, across = block_decays(rate, BLOCK)
    state = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)  # S, or R
    blocks = tl.cdiv(T, BLOCK)
    if first_role + tl.program_id(1) == 0:
        for block in range(blocks):
            rows = block * BLOCK + i
            k = load_tile(k_ptr + head, rows, d, T, D)
            v = load_tile(v_ptr + head, rows, d, T, D)
            do = load_tile(do_ptr + head, rows, d, T, D)
            dq = tl.dot(scaled(do, to_row), tl.trans(state.to(do.dtype)), input_precision=PRECISION)
            pairs = decayed_product(do, v, rate, PRECISION, BLOCK)
            store_tile(dq_ptr + head, tl.dot(pairs, k, dq, input_precision=PRECISION), rows, d, T, D)
            state = tl.dot(tl.trans(scaled(k, to_end)), v, state * across, input_precision=PRECISION)
    else:
        for back in range(blocks):
            rows = (blocks - 1 - back) * BLOCK + i
            q = load_tile(q_ptr + head, rows, d, T, D)
            k = load_tile(k_ptr + head, rows, d, T, D)
            v = load_tile(v_ptr + head, rows, d, T, D)
            do = load_tile(do_ptr + head, rows, d, T, D)
            R = state.to(q.dtype)
            dk = tl.dot(scaled(v, to_end), tl.trans(R), input_precision=PRECISION)
            pairs = tl.trans(decayed_product(do, v, rate, PRECISION, BLOCK))
            store_tile(dk_ptr + head, tl.dot(pairs, q, dk, input_precision=PRECISION), rows, d, T, D)
            dv = tl.dot(scaled(k, to_end), R, input_precision=PRECISION)
            pairs = tl.trans(decayed_product(q, k, rate, PRECISION, BLOCK))
            store_tile(dv_ptr + head, tl.dot(pairs, do, dv, input_precision=PRECISION), rows, d, T, D)
            state = tl.dot(tl.trans(scaled(q, to_row)), do, state * across, input_precision=PRECISION)


class LightningAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rates):
        q, k, v, rates = q.contiguous(), k.contiguous(), v.contiguous(), rates.contiguous()
        ctx.save_for_backward(q, k, v, rates)
        return lightning_attention(q, k, v, rates)

    @staticmethod
    def backward(ctx, do):
        q, k, v, rates = ctx.saved_tensors
        B, H, T, D = q.shape
        needs = ctx.needs_input_grad
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        first_role = 0 if needs[0] else 1
        roles = (1 if needs[1] or needs[2] else 0) + 1 - first_role
        walks_kernel[(B * H, roles)](
            q, k, v, rates, do.contiguous(), dq, dk, dv, T, H, D, first_role, **tiling(q)
        )
        grads = zip((dq, dk, dv), needs[:3], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def lightning_attention_autograd(q, k, v, rates):
    return LightningAttention.apply(q, k, v, rates)
