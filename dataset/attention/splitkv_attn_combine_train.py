"""Few queries, many keys: attention split over the keys, in both directions.

Forward    P = softmax(s Q K^T),  O = P V for M <= 64 queries and N keys.  A split c of the keys gives
           O_c and L_c = log sum_{j in c} exp(S_ij);  L = log sum_c exp(L_c),  O = sum_c exp(L_c - L) O_c
Backward   P_ij = exp(S_ij - L_i) needs no split's own statistics, only the last L:
           dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dK = s dS^T Q,
           dQ = sum over the splits of s dS_c K_c

Forward schedule: with M queries in one tile, a grid of (batch, head) alone would leave a GPU idle. Programs
own (batch, head, split of the keys), walk their keys, and store an output and L_c in fp32; a second kernel
combines the splits and stores O and L (in log2).
Backward schedule: the same programs, and no others. All queries of a head fit one tile, so the owner of a
split of keys has with it everything that meets them: it makes delta itself, rebuilds each tile of P once, and
stores its dK and dV directly, with no one else writing there. Only dQ crosses splits: it gathers over a
split's tiles in registers, is stored as a part, and a last kernel adds the parts in a fixed order. That is
M D numbers a split, little beside the 2 D a key that are read anyway; all keys and values are read once.

op: splitkv_attention
schedule: partials_then_reduce, swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634
SPLIT = 4  # tiles of keys a program


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_M, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in q.shape[2:])
    BLOCK_N = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, o_parts_ptr, l_parts_ptr, M, N, D, scale_log2, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = tl.program_id(0) * SPLIT * BLOCK_N
    for start in range(begin, tl.minimum(begin + SPLIT * BLOCK_N, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * N * D, cols, d, N, D)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    part = head * tl.num_programs(0) + tl.program_id(0)
    store_tile(o_parts_ptr + part * M * D, acc / total[:, None], rows, d, M, D)
    tl.store(l_parts_ptr + part * M + rows, m + tl.log2(total), mask=rows < M)


@triton.jit
def combine_kernel(
    o_parts_ptr, l_parts_ptr, o_ptr, l_ptr, C, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for c in range(C):
        part = head * C + c
        l_part = tl.load(l_parts_ptr + part * M + rows, mask=rows < M, other=0.0)
        o_part = load_tile(o_parts_ptr + part * M * D, rows, d, M, D)
        m_new = tl.maximum(m, l_part)
        rescale, e = tl.exp2(m - m_new), tl.exp2(l_part - m_new)
        total = total * rescale + e
        acc = acc * rescale[:, None] + o_part * e[:, None]
        m = m_new
    store_tile(o_ptr + head * M * D, acc / total[:, None], rows, d, M, D)
    tl.store(l_ptr + head * M + rows, m + tl.log2(total), mask=rows < M)


def splitkv_forward(q, k, v):
    (B, H, M, D), N = q.shape, k.shape[2]
    if k.shape != (B, H, N, D) or v.shape != k.shape or N == 0:
        raise ValueError("k and v do not fit q, or there are no keys")
    if M > 64 or D > 128:
        raise ValueError(f"{M} queries of dimension {D} do not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    C = triton.cdiv(N, SPLIT * tiles["BLOCK_N"])
    o_parts = torch.empty((B, H, C, M, D), device=q.device, dtype=torch.float32)
    l_parts, lse = o_parts.new_empty((B, H, C, M)), o_parts.new_empty((B, H, M))
    split_kernel[(C, B * H)](q, k, v, o_parts, l_parts, M, N, D, D**-0.5 * LOG2E, SPLIT=SPLIT, **tiles)
    combine_kernel[(B * H,)](
        o_parts, l_parts, o, lse, C, M, D, BLOCK_M=tiles["BLOCK_M"], BLOCK_D=tiles["BLOCK_D"]
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def splitkv_attention(q, k, v):
    """q: (batch, heads, M, dim), M up to 64; k, v: (batch, heads, N, dim)."""
    return splitkv_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v


SWEEP = [
    {"B": 4, "H": 16, "M": 32, "N": 8192, "D": 64},
    {"B": 1, "H": 8, "M": 5, "N": 30011, "D": 128},
]
SWEEP_CPU = [
    {"B": 2, "H": 2, "M": 5, "N": 140, "D": 16},
    {"B": 1, "H": 1, "M": 33, "N": 70, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, N, D = (dims[key] for key in ("B", "H", "M", "N", "D"))
    q = torch.randn(B, H, M, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def split_backward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr, dq_parts_ptr, M, N, D, scale, scale_log2,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    o = load_tile(o_ptr + head * M * D, rows, d, M, D)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    lse = tl.load(lse_ptr + head * M + rows, mask=rows < M, other=float("inf"))
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = tl.program_id(0) * SPLIT * BLOCK_N
    for start in range(begin, tl.minimum(begin + SPLIT * BLOCK_N, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * N * D, cols, d, N, D)
        v = load_tile(v_ptr + head * N * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        p = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        store_tile(dk_ptr + head * N * D, dk * scale, cols, d, N, D)
        store_tile(dv_ptr + head * N * D, dv, cols, d, N, D)
    part = head * tl.num_programs(0) + tl.program_id(0)
    store_tile(dq_parts_ptr + part * M * D, dq, rows, d, M, D)


@triton.jit
def dq_sum_kernel(dq_parts_ptr, dq_ptr, C, size, scale, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        dq += tl.load(dq_parts_ptr + (head * C + c) * size + at, mask=at < size, other=0.0)
    tl.store(dq_ptr + head * size + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=at < size)


class SplitKVAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = splitkv_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        (B, H, M, D), N, tiles, needs = q.shape, k.shape[2], tiling(q), ctx.needs_input_grad
        C, scale = triton.cdiv(N, SPLIT * tiles["BLOCK_N"]), D**-0.5
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        dq_parts = lse.new_empty((B, H, C, M, D))
        split_backward_kernel[(C, B * H)](
            q, k, v, o, lse, do.contiguous(), grads[1], grads[2], dq_parts, M, N, D, scale, scale * LOG2E,
            SPLIT=SPLIT, **tiles,
        )  # fmt: skip
        if needs[0]:
            dq_sum_kernel[(triton.cdiv(M * D, 256), B * H)](dq_parts, grads[0], C, M * D, scale, BLOCK=256)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def splitkv_attention_autograd(q, k, v):
    return SplitKVAttention.apply(q, k, v)
