"""Cross-attention: M queries of one sequence look at the keys of another, which is padded to N.

Forward    per batch entry and head, over the first L = kv_len[b] keys:  P = softmax(s Q K^T),  O = P V;
           O = 0 where L = 0
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,   dQ = s dS K (a sum over L keys),
           dK = s dS^T Q,  dV = P^T dO (sums over M queries), and both 0 in the padding

Forward schedule: a program owns a tile of queries and walks the keys up to L, not N: padding costs nothing.
Tensors stay as projections leave them, (batch, token, head, dim); a head is a stride, and nothing is
transposed. lse is saved, in units of log2.
Backward schedule: queries and keys are different axes with lengths of their own, so the two owners have grids
of their own. A query tile's owner walks L keys for dQ. A key tile's owner walks all M queries for dK and dV,
or none: if its tile is all padding, its loop is empty and it stores the zeros that the caller is to see. In a
batch of uneven lengths that is most of the saved work, and no buffer has to be cleared first.

op: cross_attention
schedule: swap_owner, recompute_from_stats
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
def load_tile(ptr, rows, d, R, D, stride):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, R, D, stride):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def cross_attention_kernel(
    q_ptr, k_ptr, v_ptr, len_ptr, o_ptr, lse_ptr, M, N, H, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    L = tl.minimum(tl.load(len_ptr + b), N)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q_at, k_at = (b * M * H + h) * D, (b * N * H + h) * D
    q = load_tile(q_ptr + q_at, rows, d, M, D, H * D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + k_at, cols, d, L, D, H * D)
        v = load_tile(v_ptr + k_at, cols, d, L, D, H * D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(total > 0.0, total, 1.0)  # without keys
    store_tile(o_ptr + q_at, acc / total[:, None], rows, d, M, D, H * D)
    tl.store(lse_ptr + (b * M + rows) * H + h, m + tl.log2(total), mask=rows < M)


def cross_attention_forward(q, k, v, kv_len):
    (B, M, H, D), N = q.shape, k.shape[1]
    if k.shape != (B, N, H, D) or v.shape != k.shape or kv_len.shape != (B,):
        raise ValueError("k, v or kv_len do not fit q")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, M, H), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), B * H)
    cross_attention_kernel[grid](q, k, v, kv_len, o, lse, M, N, H, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def cross_attention(q, k, v, kv_len):
    """q: (batch, M, heads, dim); k, v: (batch, N, heads, dim); kv_len: int64 (batch), keys that are real."""
    return cross_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), kv_len.contiguous())[0]


def reference(q, k, v, kv_len):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    real = (torch.arange(k.shape[2], device=q.device) < kv_len[:, None])[:, None, None, :]
    s = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)).masked_fill(~real, -1e30)
    return ((torch.softmax(s, dim=-1) * real) @ v).transpose(1, 2)


SWEEP = [
    {"B": 4, "H": 16, "M": 1024, "N": 1500, "D": 64},
    {"B": 2, "H": 8, "M": 4096, "N": 77, "D": 128},
]
SWEEP_CPU = [{"B": 2, "H": 2, "M": 33, "N": 77, "D": 32}, {"B": 3, "H": 1, "M": 70, "N": 9, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, N, D = (dims[key] for key in ("B", "H", "M", "N", "D"))
    q = torch.randn(B, M, H, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, N, H, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randint(N // 4, N + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (batch, query, head) triples
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, cols, L, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] < L, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, len_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, M, N, H, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    L = tl.minimum(tl.load(len_ptr + b), N)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q_at, k_at = (b * M * H + h) * D, (b * N * H + h) * D
    q = load_tile(q_ptr + q_at, rows, d, M, D, H * D)
    do = load_tile(do_ptr + q_at, rows, d, M, D, H * D)
    lse = tl.load(lse_ptr + (b * M + rows) * H + h, mask=rows < M, other=float("inf"))
    delta = tl.load(delta_ptr + (b * M + rows) * H + h, mask=rows < M, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + k_at, cols, d, L, D, H * D)
        v = load_tile(v_ptr + k_at, cols, d, L, D, H * D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, L, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + q_at, dq * scale, rows, d, M, D, H * D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, len_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, M, N, H, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    L = tl.minimum(tl.load(len_ptr + b), N)
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q_at, k_at = (b * M * H + h) * D, (b * N * H + h) * D
    k = load_tile(k_ptr + k_at, cols, d, L, D, H * D)
    v = load_tile(v_ptr + k_at, cols, d, L, D, H * D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.where(first < L, M, 0), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + q_at, rows, d, M, D, H * D)
        do = load_tile(do_ptr + q_at, rows, d, M, D, H * D)
        lse = tl.load(lse_ptr + (b * M + rows) * H + h, mask=rows < M, other=float("inf"))
        delta = tl.load(delta_ptr + (b * M + rows) * H + h, mask=rows < M, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, L, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + k_at, dk * scale, cols, d, N, D, H * D)  # up to N: zeros in the padding
    store_tile(dv_ptr + k_at, dv, cols, d, N, D, H * D)


class CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kv_len):
        q, k, v, kv_len = q.contiguous(), k.contiguous(), v.contiguous(), kv_len.contiguous()
        o, lse = cross_attention_forward(q, k, v, kv_len)
        ctx.save_for_backward(q, k, v, kv_len, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, kv_len, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, M, H, D), N = q.shape, k.shape[1]
        tiles, needs = tiling(q), ctx.needs_input_grad
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * M * H, 32),)](
            o, do, delta, B * M * H, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen, sizes = (q, k, v, kv_len, do, lse, delta), (M, N, H, D, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(triton.cdiv(M, tiles["BLOCK"]), B * H)](*seen, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](*seen, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None, None


def cross_attention_autograd(q, k, v, kv_len):
    return CrossAttention.apply(q, k, v, kv_len)
