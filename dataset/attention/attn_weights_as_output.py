"""Attention that also gives its weights, as layers with need_weights and losses on alignments want them.

Forward    P = softmax(s Q K^T),  O = P V;  O and P are outputs, and both may have a gradient, dO and dW
Backward   the whole gradient of P is  dP = dO V^T + dW,   dV = P^T dO,
           dS = P * (dP - delta),  delta_i = sum_j P_ij dP_ij = <dO_i, O_i> + sum_j P_ij dW_ij,
           dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns a query tile and walks the keys twice: for the row's maximum and total, then
for normalised weights, which it stores and multiplies with V. No rescaling, and P is final when it is
written.
Backward schedule: P is in memory because somebody wanted it, so it is read where flash attention would
rebuild it: a tile of P costs as many bytes as a tile of K of the same length and saves a dot and an exp, and
no lse is kept. With dW the correction is not <dO, O> any more: the prologue adds a row sum over P * dW, one
pass over two N x N tensors that have to be read anyway. Then query tiles own dQ and key tiles dK and dV, as
usual; each reads its tile of dW beside that of P.

op: attention_with_weights
schedule: swap_owner, row_reduce_correct
difficulty: 3
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
    q_ptr, k_ptr, v_ptr, o_ptr, p_ptr, M, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    k_ptr += head * N * D
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.dot(q, tl.trans(load_tile(k_ptr, cols, d, N, D)), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(s - m_new[:, None]), axis=1)
        m = m_new
    lse = m + tl.log2(total)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.dot(q, tl.trans(load_tile(k_ptr, cols, d, N, D)), input_precision=PRECISION) * scale_log2
        p = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
        store_tile(p_ptr + head * M * N, p, rows, cols, M, N)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    store_tile(o_ptr + head * M * D, acc, rows, d, M, D)


@autodiff(inputs_require_grad=(0, 1, 2))
def attention_with_weights(q, k, v):
    """q: (batch, heads, M, dim); k, v: (batch, heads, N, dim), N at least 1; gives o, and p (.., M, N)."""
    q, k, v, (B, H, M, D), N = q.contiguous(), k.contiguous(), v.contiguous(), q.shape, k.shape[2]
    if k.shape != (B, H, N, D) or v.shape != k.shape or N == 0:
        raise ValueError("k and v do not fit q, or there are no keys")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, p, tiles = torch.empty_like(q), q.new_empty((B, H, M, N)), tiling(q)
    grid = (triton.cdiv(M, tiles["BLOCK"]), B * H)
    attention_kernel[grid](q, k, v, o, p, M, N, D, D**-0.5 * LOG2E, **tiles)
    return o, p


def reference(q, k, v):
    p = torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1)
    return p @ v, p


SWEEP = [
    {"B": 8, "H": 8, "M": 512, "N": 512, "D": 64},
    {"B": 4, "H": 4, "M": 300, "N": 777, "D": 128},
]
SWEEP_CPU = [{"B": 1, "H": 2, "M": 36, "N": 40, "D": 16}, {"B": 2, "H": 1, "M": 65, "N": 7, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, N, D = (dims[key] for key in ("B", "H", "M", "N", "D"))
    q = torch.randn(B, H, M, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, p_ptr, dw_ptr, delta_ptr, M, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + head * M * D, rows, d, M, D).to(tl.float32)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        p = load_tile(p_ptr + head * M * N, rows, cols, M, N).to(tl.float32)
        delta += tl.sum(p * load_tile(dw_ptr + head * M * N, rows, cols, M, N), axis=1)
    tl.store(delta_ptr + head * M + rows, delta, mask=rows < M)


@triton.jit
def load_p_ds(p_ptr, dw_ptr, v, do, delta, rows, cols, M, N, PRECISION: tl.constexpr):
    """P, as it was stored, and dS of one tile, rows of queries by columns of keys."""
    p = load_tile(p_ptr, rows, cols, M, N)
    dw = load_tile(dw_ptr, rows, cols, M, N).to(tl.float32)
    dp = tl.dot(do, tl.trans(v), dw, input_precision=PRECISION)
    return p, p.to(tl.float32) * (dp - delta[:, None])


@triton.jit
def query_kernel(
    k_ptr, v_ptr, p_ptr, do_ptr, dw_ptr, delta_ptr, dq_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    p_ptr += head * M * N
    dw_ptr += head * M * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * N * D, cols, d, N, D)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        _, ds = load_p_ds(p_ptr, dw_ptr, v, do, delta, rows, cols, M, N, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * M * D, dq * scale, rows, d, M, D)


@triton.jit
def key_kernel(
    q_ptr, v_ptr, p_ptr, do_ptr, dw_ptr, delta_ptr, dk_ptr, dv_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    p_ptr += head * M * N
    dw_ptr += head * M * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * M * D, rows, d, M, D)
        do = load_tile(do_ptr + head * M * D, rows, d, M, D)
        delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
        p, ds = load_p_ds(p_ptr, dw_ptr, v, do, delta, rows, cols, M, N, PRECISION)
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * N * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * N * D, dv, cols, d, N, D)


class AttentionWithWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, p = attention_with_weights(q, k, v)
        ctx.save_for_backward(q, k, v, o, p)
        return o, p

    @staticmethod
    def backward(ctx, do, dw):
        q, k, v, o, p = ctx.saved_tensors
        do, dw, needs = do.contiguous(), dw.contiguous(), ctx.needs_input_grad
        (B, H, M, D), N, tiles = q.shape, k.shape[2], tiling(q)
        BLOCK, sizes = tiles["BLOCK"], (M, N, D, D**-0.5)
        delta = torch.empty((B, H, M), device=q.device, dtype=torch.float32)
        q_grid, k_grid = (triton.cdiv(M, BLOCK), B * H), (triton.cdiv(N, BLOCK), B * H)
        delta_kernel[q_grid](o, do, p, dw, delta, M, N, D, BLOCK=BLOCK, BLOCK_D=tiles["BLOCK_D"])
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[q_grid](k, v, p, do, dw, delta, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[k_grid](q, v, p, do, dw, delta, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def attention_with_weights_autograd(q, k, v):
    return AttentionWithWeights.apply(q, k, v)
