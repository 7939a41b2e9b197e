"""Attention by sigmoids: each pair of a query and a key is weighed by itself, no row is normalised.

Forward    P = sigmoid(s Q K^T + b_h),  O = P V,  b a number a head, about -log(number of keys)
Backward   with dP = dO V^T:  dS = dP * P * (1 - P),  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           db_h = sum over batch, queries and keys of dS

Forward schedule: a program owns a tile of queries and walks the keys with nothing but the accumulator: no
running maximum, no total, no rescaling. Keys beyond the end have P = sigmoid(b), not 0, and V = 0.
Backward schedule: softmax couples a row's scores and needs lse and delta; here each dS_ij follows from its
own score and its own dP, so nothing is saved, no prologue is launched, and O is not needed. Key tiles own dK
and dV, query tiles own dQ. db is the plain sum of all dS of a head: the key's owner adds up its own, which
costs an addition each, and stores the sum in a slot; a last kernel, a program a head, adds the slots. Rows
and columns beyond the end have dO or V of 0, hence dS of 0, and need no mask anywhere.

op: sigmoid_attention
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_attention_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, o_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    b = tl.load(b_ptr + tl.program_id(1) % H).to(tl.float32)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        p = tl.sigmoid(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + b)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    store_tile(o_ptr + head * D, acc, rows, d, N, D)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def sigmoid_attention(q, k, v, b):
    """q, k, v: (batch, heads, tokens, dim); b: (heads)."""
    if not q.shape == k.shape == v.shape or b.shape != q.shape[1:2]:
        raise ValueError("q, k and v must have one shape, and b a number a head")
    q, k, v, b = q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous()
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    sigmoid_attention_kernel[grid](q, k, v, b, o, H, N, D, D**-0.5, **tiles)
    return o


def reference(q, k, v, b):
    return torch.sigmoid(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + b[:, None, None]) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 59, "D": 16}, {"B": 2, "H": 3, "N": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    b = torch.randn(H, device=device) / 4 - torch.tensor(float(max(1, N)), device=device).log()
    return q, k, v, b.to(dtype)


# ---- backward ----


@triton.jit
def rebuild_p_ds(q, k, v, do, b, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    p = tl.sigmoid(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + b)
    return p, tl.dot(do, tl.trans(v), input_precision=PRECISION) * p * (1 - p)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, do_ptr, dq_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    b = tl.load(b_ptr + tl.program_id(1) % H).to(tl.float32)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, b, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, do_ptr, dk_ptr, dv_ptr, slots_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    b = tl.load(b_ptr + tl.program_id(1) % H).to(tl.float32)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        p, ds = rebuild_p_ds(q, k, v, do, b, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
        db += tl.sum(ds, axis=0)  # beyond the end dO or V is 0, and so is dS
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)
    tl.store(slots_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(db))


@triton.jit
def db_kernel(slots_ptr, db_ptr, B, H, T, BLOCK: tl.constexpr):
    """Sum of slots (B, H, T) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(slots_ptr + (i // T * H + h) * T + i % T, mask=i < B * T, other=0.0)
    tl.store(db_ptr + h, tl.sum(acc).to(db_ptr.dtype.element_ty))


class SigmoidAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, b):
        q, k, v, b = q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous()
        ctx.save_for_backward(q, k, v, b)
        return sigmoid_attention(q, k, v, b)

    @staticmethod
    def backward(ctx, do):
        q, k, v, b = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        T = triton.cdiv(N, tiles["BLOCK"])
        dq = dk = dv = db = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(T, B * H)](q, k, v, b, do, dq, H, N, D, D**-0.5, **tiles)
        if needs[1] or needs[2] or needs[3]:
            dk, dv, db = torch.empty_like(k), torch.empty_like(v), torch.empty_like(b)
            slots = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
            key_kernel[(T, B * H)](q, k, v, b, do, dk, dv, slots, H, N, D, D**-0.5, **tiles)
            if needs[3]:
                db_kernel[(H,)](slots, db, B, H, T, BLOCK=64)
        dk, dv, db = (grad if needs[at] else None for at, grad in ((1, dk), (2, dv), (3, db)))
        return dq, dk, dv, db


def sigmoid_attention_autograd(q, k, v, b):
    return SigmoidAttention.apply(q, k, v, b)
