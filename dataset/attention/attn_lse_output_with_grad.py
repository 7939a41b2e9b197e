"""Attention that gives its log-sum-exp beside its output, to be merged with attention over other keys.

Forward    S = s Q K^T,  L_i = log sum_j exp(S_ij),  P_ij = exp(S_ij - L_i),  O = P V
Backward   dL_i / dS_ij = P_ij, so a gradient of L adds P_ij dL_i to that of the softmax:
           dS_ij = P_ij (dP_ij - <dO_i, O_i> + dL_i) = P_ij (dP_ij - delta_i),  delta_i = <dO_i, O_i> - dL_i,
           dP = dO V^T,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns a tile of queries and walks the keys with an online softmax. What flash
attention saves for its backward is an output here, in fp32 and natural units. M queries may look at N keys
of another length, as with keys that arrive from another device in turn.
Backward schedule: dL needs no pass and no operand of its own: it is one subtraction where delta is made, a
prologue over rows, and the two walks over the scores (query tiles for dQ, key tiles for dK and dV) are those
of plain attention. An upstream that is absent on either side is zeros: with dL alone, delta is -dL and dV 0.

op: attention_with_lse
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


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
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * N * D, cols, d, N, D)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * M * D, acc / total[:, None], rows, d, M, D)
    tl.store(lse_ptr + head * M + rows, m / LOG2E + tl.log(total), mask=rows < M)


@autodiff(inputs_require_grad=(0, 1, 2))
def attention_with_lse(q, k, v):
    """q: (batch, heads, M, dim); k, v: (batch, heads, N, dim), N at least 1; gives o like q, and lse in
    float32 (batch, heads, M).
    """
    q, k, v, (B, H, M, D), N = q.contiguous(), k.contiguous(), v.contiguous(), q.shape, k.shape[2]
    if k.shape != (B, H, N, D) or v.shape != k.shape or N == 0:
        raise ValueError("k and v do not fit q, or there are no keys")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, M), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), B * H)
    attention_kernel[grid](q, k, v, o, lse, M, N, D, D**-0.5, **tiles)
    return o, lse


def reference(q, k, v):
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)
    return torch.softmax(s, dim=-1) @ v, torch.logsumexp(s, dim=-1)


SWEEP = [
    {"B": 2, "H": 16, "M": 2048, "N": 2048, "D": 64},
    {"B": 1, "H": 12, "M": 700, "N": 1531, "D": 128},
]
SWEEP_CPU = [{"B": 1, "H": 2, "M": 36, "N": 50, "D": 16}, {"B": 2, "H": 1, "M": 65, "N": 7, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, N, D = (dims[key] for key in ("B", "H", "M", "N", "D"))
    q = torch.randn(B, H, M, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, dlse_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    dlse = tl.load(dlse_ptr + rows, mask=rows < R, other=0.0)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1) - dlse, mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    p = tl.exp2(tl.where(cols[None, :] < N, (s - lse[:, None]) * LOG2E, -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
    delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * N * D, cols, d, N, D)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * M * D, dq * scale, rows, d, M, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * N * D, cols, d, N, D)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * M * D, rows, d, M, D)
        do = load_tile(do_ptr + head * M * D, rows, d, M, D)
        lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
        delta = tl.load(delta_ptr + head * M + rows, mask=rows < M, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * N * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * N * D, dv, cols, d, N, D)


class AttentionWithLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = attention_with_lse(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, M, D), N, tiles = q.shape, k.shape[2], tiling(q)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * M, 32),)](
            o, do, dlse.contiguous(), delta, B * H * M, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, do, lse, delta)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(triton.cdiv(M, tiles["BLOCK"]), B * H)](*seen, dq, M, N, D, D**-0.5, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](*seen, dk, dv, M, N, D, D**-0.5, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def attention_with_lse_autograd(q, k, v):
    return AttentionWithLSE.apply(q, k, v)
