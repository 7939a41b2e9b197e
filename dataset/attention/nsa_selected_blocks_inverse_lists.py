"""Sparse attention in which every query picks the blocks of 64 keys that it attends to.

Forward    for query i and a group of heads with one key head:  S_j = <q_i, k_j> / sqrt(D) for the j <= i in
           the blocks that i picked,  P = softmax(S),  o_i = sum_j P_j v_j;  the G heads share the picks
Backward   dS_j = P_j (<do_i, v_j> - delta_i),  delta_i = <do_i, o_i>,   dq_i = sum_j dS_j k_j / sqrt(D),
           dk_j = sum over the i that picked the block of j, and their G heads, of dS_ij q_i / sqrt(D),
           dv_j = the same sum of P_ij do_i

Forward schedule: a program owns one query and one key head. Its tile has the G query heads as rows, so that a
dot has rows enough although each query has its own keys; it walks the T picked blocks with an online softmax.
A pick of -1 stands for none. lse is saved, in units of log2.
Backward schedule: dq keeps the forward's ownership. For dk and dv the picks are inverted: one stable sort of
(key head, block) turns query -> blocks into block -> queries. A key block's owner walks the queries of its
list with K, V, dK and dV in registers, rebuilds P from lse and stores once. Adding from the queries' side by
atomics would move, a pick, 64 rows of dk and of dv there and back, in an order that changes from run to run;
the lists move G rows of q and of do, once, and the sum over heads is the reduction axis of the same dots.

op: selected_attention
schedule: segment_gather, swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634
BLOCK = 64  # of keys


def tiling(q, k):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_G, BLOCK_D = (
        max(16, triton.next_power_of_2(size)) for size in (q.shape[1] // k.shape[1], q.shape[3])
    )
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_G": BLOCK_G, "BLOCK_D": BLOCK_D}


def query_lists(picks, blocks):
    """int64: where the list of each (batch, key head, block) begins, and the queries in the lists;
    picks of -1 come after all of them.
    """
    B, HK, N, T = picks.shape
    head = torch.arange(B * HK, device=picks.device).view(B, HK, 1, 1)
    key = (head * blocks + picks).masked_fill(picks < 0, B * HK * blocks).flatten()
    key, order = key.sort(stable=True)
    begin = torch.searchsorted(key, torch.arange(B * HK * blocks + 1, device=picks.device))
    return begin, order // max(1, T) % max(1, N)


@triton.jit
def load_tile(ptr, rows, cols, R, D, stride):
    mask = (rows[:, None] < R) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, D, stride):
    mask = (rows[:, None] < R) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def selected_kernel(
    q_ptr, k_ptr, v_ptr, picks_ptr, o_ptr, lse_ptr, G, N, D, T, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    place = group * G * N + i
    q = load_tile(q_ptr + place * D, g, d, G, D, N * D)
    m = tl.full([BLOCK_G], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for t in range(T):
        pick = tl.load(picks_ptr + (group * N + i) * T + t)
        if pick >= 0:
            cols = pick * BLOCK + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + group * N * D, cols, d, N, D, D)
            v = load_tile(v_ptr + group * N * D, cols, d, N, D, D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            s = tl.where(cols[None, :] <= i, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            m = m_new
    total = tl.where(total > 0.0, total, 1.0)
    store_tile(o_ptr + place * D, acc / total[:, None], g, d, G, D, N * D)
    tl.store(lse_ptr + place + g * N, m + tl.log2(total), mask=g < G)


def selected_forward(q, k, v, picks):
    B, HQ, N, D = q.shape
    HK, T = k.shape[1], picks.shape[3]
    if k.shape != (B, HK, N, D) or v.shape != k.shape or picks.shape != (B, HK, N, T) or HQ % HK:
        raise ValueError("k, v and picks do not fit q, or the key heads do not divide its heads")
    if D > 128 or HQ > 64 * HK:
        raise ValueError(f"{HQ // HK} heads a group of dimension {D} do not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, HQ, N), device=q.device, dtype=torch.float32)
    selected_kernel[(N, B * HK)](q, k, v, picks, o, lse, HQ // HK, N, D, T, D**-0.5 * LOG2E, **tiling(q, k))
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def selected_attention(q, k, v, picks):
    """q: (B, HQ, N, D); k, v: (B, HK, N, D); picks: int64 (B, HK, N, T), different blocks of keys, or -1."""
    return selected_forward(*(tensor.contiguous() for tensor in (q, k, v, picks)))[0]


def reference(q, k, v, picks):
    N, G = q.shape[2], q.shape[1] // k.shape[1]
    keys = torch.arange(N, device=q.device)
    seen = ((keys // BLOCK)[:, None] == picks[..., None, :]).any(-1) & (keys <= keys[:, None])
    seen, k, v = (tensor.repeat_interleave(G, dim=1) for tensor in (seen, k, v))
    s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
    return (torch.softmax(s, dim=-1) * seen) @ v


SWEEP = [
    {"B": 1, "HQ": 64, "HK": 4, "N": 2048, "T": 16, "D": 128},
    {"B": 2, "HQ": 12, "HK": 2, "N": 2039, "T": 8, "D": 64},
]
SWEEP_CPU = [
    {"B": 1, "HQ": 4, "HK": 2, "N": 66, "T": 2, "D": 16},
    {"B": 1, "HQ": 17, "HK": 1, "N": 131, "T": 2, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, HQ, HK, N, T, D = (dims[key] for key in ("B", "HQ", "HK", "N", "T", "D"))
    q = torch.randn(B, HQ, N, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, HK, N, D, device=device, dtype=dtype) for _ in range(2))
    last = torch.arange(N, device=device)[:, None] // BLOCK  # a query picks its own block, and some before
    block = torch.arange(triton.cdiv(N, BLOCK), device=device)
    rank = torch.rand(B, HK, N, block.numel(), device=device).masked_fill(block > last, -1)
    best = rank.masked_fill(block == last, 2).topk(min(T, block.numel()), dim=-1)
    picks = best.indices.masked_fill(best.values < 0, -1)
    return q, k, v, torch.nn.functional.pad(picks, (0, T - picks.shape[-1]), value=-1)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=0))


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    """P and dS of a query's heads by the keys of a block."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, query_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, G, N, D,
    scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + group * N * D, cols, d, N, D, D)
    v = load_tile(v_ptr + group * N * D, cols, d, N, D, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    lists = begin_ptr + group * tl.num_programs(0) + tl.program_id(0)
    for entry in range(tl.load(lists), tl.load(lists + 1)):
        i = tl.load(query_ptr + entry)
        place = group * G * N + i
        q = load_tile(q_ptr + place * D, g, d, G, D, N * D)
        do = load_tile(do_ptr + place * D, g, d, G, D, N * D)
        lse = tl.load(lse_ptr + place + g * N, mask=g < G, other=0.0)
        delta = tl.load(delta_ptr + place + g * N, mask=g < G, other=0.0)
        seen = (g[:, None] < G) & (cols[None, :] <= i)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + group * N * D, dk * scale, cols, d, N, D, D)
    store_tile(dv_ptr + group * N * D, dv, cols, d, N, D, D)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, picks_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, T, G, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    place = group * G * N + i
    q = load_tile(q_ptr + place * D, g, d, G, D, N * D)
    do = load_tile(do_ptr + place * D, g, d, G, D, N * D)
    lse = tl.load(lse_ptr + place + g * N, mask=g < G, other=0.0)
    delta = tl.load(delta_ptr + place + g * N, mask=g < G, other=0.0)
    dq = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for t in range(T):
        pick = tl.load(picks_ptr + (group * N + i) * T + t)
        if pick >= 0:
            cols = pick * BLOCK + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + group * N * D, cols, d, N, D, D)
            v = load_tile(v_ptr + group * N * D, cols, d, N, D, D)
            seen = (g[:, None] < G) & (cols[None, :] <= i)
            _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + place * D, dq * scale, g, d, G, D, N * D)


class SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, picks):
        q, k, v, picks = q.contiguous(), k.contiguous(), v.contiguous(), picks.contiguous()
        o, lse = selected_forward(q, k, v, picks)
        ctx.save_for_backward(q, k, v, picks, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, picks, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, HQ, N, D), HK, T = q.shape, k.shape[1], picks.shape[3]
        tiles, needed = tiling(q, k), ctx.needs_input_grad
        sizes = (HQ // HK, N, D, D**-0.5, D**-0.5 * LOG2E)
        delta = torch.empty_like(lse)
        delta_kernel[(B * HQ * N,)](o, do, delta, D, BLOCK_D=tiles["BLOCK_D"])
        dq = dk = dv = None
        if needed[0]:
            dq = torch.empty_like(q)
            query_kernel[(N, B * HK)](q, k, v, picks, do, lse, delta, dq, T, *sizes, **tiles)
        if needed[1] or needed[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            blocks = triton.cdiv(N, BLOCK)
            lists = query_lists(picks, blocks)
            key_kernel[(blocks, B * HK)](q, k, v, *lists, do, lse, delta, dk, dv, *sizes, **tiles)
        return dq, dk if needed[1] else None, dv if needed[2] else None, None


def selected_attention_autograd(q, k, v, picks):
    return SelectedAttention.apply(q, k, v, picks)
