"""Neighbourhood attention along a sequence: every query has K keys, also at the ends, where windows move in.

Forward    window of i begins at b_i = min(max(i - K // 2, 0), N - K);  P_ij = softmax over b_i <= j < b_i + K
           of s <q_i, k_j>,  o_i = sum_j P_ij v_j
Backward   dS_ij = P_ij (<do_i, v_j> - delta_i),  delta_i = <do_i, o_i>,   dq_i = s sum_j dS_ij k_j,
           dk_j = s sum_i dS_ij q_i,  dv_j = sum_i P_ij do_i, over the i whose window holds j:
           first_j = 0 if j < K, else j - (K - 1 - K // 2);   last_j = N - 1 if j >= N - K, else j + K // 2

Forward schedule: K is a few keys, other ones for each query: no dot. A program owns a tile of queries, loops
over the K places of a window, and loads the key of each query at that place; an online softmax reads K and V
once. lse is saved.
Backward schedule: the map from query to window is not a shift, so its inverse is not one either. In the
middle a key is in K windows, those of the queries around it. But queries near an end all have the same
window, the end's K keys, so those keys have up to K // 2 queries more, and a mirrored loop of K offsets would
lose them. The inverse of a clamp is a range all the same: from b_i <= j the last query, from j < b_i + K the
first, and at the ends the clamp lets either run to the end of the sequence. A program owns a tile of keys and
gathers over places in that range, as many as the longest in its tile: only tiles at the ends loop longer.

op: neighborhood_attention
schedule: gather_transpose, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, n, inside, d, D):
    """The rows n, a row for each lane, 0 where not inside."""
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(ptr + n[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, value, n, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    tl.store(ptr + n[:, None] * D + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def neighborhood_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, K, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64) * N
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = i < N
    begin = tl.minimum(tl.maximum(i - K // 2, 0), N - K)
    q = load_rows(q_ptr + head * D, i, inside, d, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for place in range(K):
        k = load_rows(k_ptr + head * D, begin + place, inside, d, D)
        v = load_rows(v_ptr + head * D, begin + place, inside, d, D)
        s = tl.sum(q * k, axis=1) * scale
        m_new = tl.maximum(m, s)
        p, rescale = tl.exp(s - m_new), tl.exp(m - m_new)
        total = total * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * v
        m = m_new
    store_rows(o_ptr + head * D, acc / total[:, None], i, inside, d, D)
    tl.store(lse_ptr + head + i, m + tl.log(total), mask=inside)


def launch(q):
    """The grid and the tiles: a tile of about 2048 numbers."""
    B, H, N, D = q.shape
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK = max(1, 2048 // BLOCK_D)
    return (triton.cdiv(N, BLOCK), B * H), {"BLOCK": BLOCK, "BLOCK_D": BLOCK_D}


def neighborhood_forward(q, k, v, K):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    if D > 256 or not 1 <= K <= N:
        raise ValueError(f"a head of {D} does not fit one tile, or {N} tokens have no window of {K}")
    o, (grid, blocks) = torch.empty_like(q), launch(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    neighborhood_kernel[grid](q, k, v, o, lse, N, D, K, D**-0.5, **blocks)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def neighborhood_attention(q, k, v, K):
    """q, k, v: (batch, heads, tokens, dim); K: keys a window, at most as many as tokens."""
    return neighborhood_forward(q.contiguous(), k.contiguous(), v.contiguous(), K)[0]


def reference(q, k, v, K):
    N, D = q.shape[-2:]
    j = torch.arange(N, device=q.device)
    begin = (j - K // 2).clamp(min=0).clamp(max=N - K)[:, None]
    seen = (j >= begin) & (j < begin + K)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 4, "H": 8, "N": 8192, "K": 13, "D": 32},
    {"B": 2, "H": 6, "N": 5003, "K": 8, "D": 48},
]
SWEEP_CPU = [
    {"B": 2, "H": 2, "N": 43, "K": 7, "D": 8},
    {"B": 1, "H": 1, "N": 140, "K": 4, "D": 11},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3)), {"K": dims["K"]}


# ---- backward ----


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, delta_ptr, dq_ptr, N, D, K, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = i < N
    begin = tl.minimum(tl.maximum(i - K // 2, 0), N - K)
    q = load_rows(q_ptr + head * D, i, inside, d, D)
    do = load_rows(do_ptr + head * D, i, inside, d, D)
    lse = tl.load(lse_ptr + head + i, mask=inside, other=0.0)
    delta = tl.sum(do * load_rows(o_ptr + head * D, i, inside, d, D), axis=1)
    tl.store(delta_ptr + head + i, delta, mask=inside)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for place in range(K):
        k = load_rows(k_ptr + head * D, begin + place, inside, d, D)
        v = load_rows(v_ptr + head * D, begin + place, inside, d, D)
        p = tl.exp(tl.sum(q * k, axis=1) * scale - lse)
        dq += (p * (tl.sum(do * v, axis=1) - delta))[:, None] * k
    store_rows(dq_ptr + head * D, dq * scale, i, inside, d, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, K, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    j, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = j < N
    first = tl.where(j < K, 0, j - (K - 1 - K // 2))
    last = tl.where(j >= N - K, N - 1, j + K // 2)
    count = tl.where(inside, last - first + 1, 0)
    k = load_rows(k_ptr + head * D, j, inside, d, D)
    v = load_rows(v_ptr + head * D, j, inside, d, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for place in range(tl.max(count, axis=0)):
        i, holds = first + place, place < count
        q = load_rows(q_ptr + head * D, i, holds, d, D)
        do = load_rows(do_ptr + head * D, i, holds, d, D)
        lse = tl.load(lse_ptr + head + i, mask=holds, other=float("inf"))
        delta = tl.load(delta_ptr + head + i, mask=holds, other=0.0)
        p = tl.exp(tl.sum(q * k, axis=1) * scale - lse)
        dv += p[:, None] * do
        dk += (p * (tl.sum(do * v, axis=1) - delta))[:, None] * q
    store_rows(dk_ptr + head * D, dk * scale, j, inside, d, D)
    store_rows(dv_ptr + head * D, dv, j, inside, d, D)


class NeighborhoodAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, K):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = neighborhood_forward(q, k, v, K)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.K = K
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (N, D), (grid, blocks) = q.shape[2:], launch(q)
        sizes = (N, D, ctx.K, D**-0.5)
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        query_kernel[grid](q, k, v, o, lse, do, delta, dq, *sizes, **blocks)  # makes delta for the keys too
        dk = dv = None
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, lse, do, delta, dk, dv, *sizes, **blocks)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, None


def neighborhood_attention_autograd(q, k, v, K):
    return NeighborhoodAttention.apply(q, k, v, K)
