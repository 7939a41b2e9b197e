"""Causal flash attention whose backward rebuilds the scores once: dQ is added by atomics.

Forward    S = s Q K^T, P = softmax(S with S_ij = -inf for j > i), O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  delta_i = <dO_i, O_i>,
           dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal with an online
softmax; it saves lse, in units of log2.
Backward schedule: a tile of dS feeds dK (a sum over queries) and dQ (a sum over keys), and costs two dots to
rebuild. Two kernels with two ownerships rebuild it twice: seven dots a tile. Here the owner of a key tile
keeps dK and dV in registers and adds dS K to dQ in memory: five dots a tile, 5 / 7 of the arithmetic, for
one read and write of a tile of dQ in fp32 each step. That pays on a GPU where dots are the limit and the fp32
buffer of dQ stays in L2; the price is a sum whose order, and so whose last bits, change from run to run. The
owners of a head start at their own diagonals, so that they do not all add to the same rows at once. A last
kernel scales the sum and rounds it, once.

op: causal_attention
schedule: swap_owner, atomic_accumulate, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


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
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def attention_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    attention_kernel[grid](q, k, v, o, lse, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def causal_attention(q, k, v):
    """q, k, v: (batch, heads, tokens, dim)."""
    return attention_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    N, D = q.shape[-2:]
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 65, "D": 16}, {"B": 2, "H": 1, "N": 40, "D": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, sum_ptr, dk_ptr, dv_ptr, N, D, scale, scale_log2,
    QUERIES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = (cols[None, :] <= rows[:, None]) & (rows[:, None] < N)
        p = tl.exp2(tl.where(visible, s - lse[:, None], -float("inf")))
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        if QUERIES:
            part = tl.dot(ds, k, input_precision=PRECISION)
            mask = (rows[:, None] < N) & (d[None, :] < D)
            place = sum_ptr + head * D + rows[:, None] * D + d[None, :]
            tl.atomic_add(place, part, mask=mask, sem="relaxed")
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dq_kernel(sum_ptr, dq_ptr, n_elements, scale, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.load(sum_ptr + offs, mask=offs < n_elements, other=0.0) * scale
    tl.store(dq_ptr + offs, dq.to(dq_ptr.dtype.element_ty), mask=offs < n_elements)


class CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        tiles, needs, scale = tiling(q), ctx.needs_input_grad, D**-0.5
        BLOCK, BLOCK_D = tiles["BLOCK"], tiles["BLOCK_D"]
        delta, dq, dk, dv = (torch.empty_like(tensor) for tensor in (lse, q, k, v))
        total = torch.zeros(q.shape if needs[0] else (0,), device=q.device, dtype=torch.float32)
        delta_kernel[(triton.cdiv(B * H * N, BLOCK),)](
            o, do, delta, B * H * N, D, BLOCK=BLOCK, BLOCK_D=BLOCK_D
        )
        attention_backward_kernel[(triton.cdiv(N, BLOCK), B * H)](
            q, k, v, do, lse, delta, total, dk, dv, N, D, scale, scale * LOG2E, QUERIES=needs[0], **tiles
        )
        if needs[0]:
            dq_kernel[(triton.cdiv(q.numel(), 1024),)](total, dq, q.numel(), scale, BLOCK=1024)
        return tuple(g if needed else None for g, needed in zip((dq, dk, dv), needs, strict=True))


def causal_attention_autograd(q, k, v):
    return CausalAttention.apply(q, k, v)
