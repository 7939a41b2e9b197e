"""Features carried from source points to query points, weighted by inverse distances to given neighbours.

Forward    e_qk = |p_q - s_{n_qk}|^2,  w_qk = 1 / (e_qk + eps),  a_qk = w_qk / sum_k w_qk,
           y_q = sum_k a_qk f_{n_qk}
Backward   dy_q/dw_qk = (f_{n_qk} - y_q) / sum_k w_qk and dw/de = -w^2. With c_qk = <dy_q, f_{n_qk}>:
           h_qk = -2 w_qk a_qk (c_qk - sum_l a_ql c_ql)  (that is 2 dl/de_qk),
           dp_q = sum_k h_qk (p_q - s_{n_qk}),
           ds_j = -sum_{(q, k): n_qk = j} h_qk (p_q - s_j),   df_j = sum_{(q, k): n_qk = j} a_qk dy_q

Forward schedule: a program owns a tile of queries and a chunk of channels, and gathers its neighbours.
Backward schedule: two steps. The owner of a query reduces the channels to its c_qk, in one pass over the
neighbours' features, since <dy, y> is a sum of the same numbers; it stores dp, and a and h, two numbers an
edge. A source point is gathered by many queries: the neighbour table is inverted by a sort, and the owner of
a source walks its edges. It is told a and h, so an edge costs a row of dy and a point; no atomics, and hot
sources, which atomics would queue up for, are merely longer lists.

op: knn_interpolate
schedule: segment_gather, row_reduce_correct
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, rows, cols, rows_mask, C):
    mask = rows_mask[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def weight_of(p, s_ptr, n_ptr, q, k, Q, K, eps):
    """The k-th neighbours of queries q, their offsets p - s, their weights."""
    n = tl.load(n_ptr + q.to(tl.int64) * K + k, mask=q < Q, other=0)
    u = p - load_rows(s_ptr, n, tl.arange(0, 4), q < Q, 3)
    return n, u, 1 / (tl.sum(u * u, axis=1) + eps)


@triton.jit
def interpolate_kernel(
    f_ptr, p_ptr, s_ptr, n_ptr, y_ptr, Q, K, C, eps, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr
):
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = load_rows(p_ptr, q, tl.arange(0, 4), q < Q, 3)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    y = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
    for k in range(K):
        n, _, w = weight_of(p, s_ptr, n_ptr, q, k, Q, K, eps)
        total += w
        y += w[:, None] * load_rows(f_ptr, n, c, q < Q, C)
    mask = (q[:, None] < Q) & (c[None, :] < C)
    tl.store(y_ptr + q[:, None].to(tl.int64) * C + c[None, :], y / total[:, None], mask=mask)


def check_points(f, p, s, n):
    if p.shape[1] != 3 or s.shape != (f.shape[0], 3) or n.shape[0] != p.shape[0] or n.shape[1] == 0:
        raise ValueError("need f (S, C), p (Q, 3), s (S, 3) and n (Q, K)")


@autodiff(inputs_require_grad=(0, 1, 2))
def knn_interpolate(f, p, s, n, eps=1e-2):
    """f: (S, C) at points s (S, 3); p: (Q, 3); n: int64 (Q, K), rows of f and s; gives (Q, C)."""
    check_points(f, p, s, n)
    f, p, s, n = (tensor.contiguous() for tensor in (f, p, s, n))
    (Q, K), C = n.shape, f.shape[1]
    y = torch.empty((Q, C), device=f.device, dtype=f.dtype)
    grid = (triton.cdiv(Q, 16), triton.cdiv(C, 64))
    interpolate_kernel[grid](f, p, s, n, y, Q, K, C, eps, BLOCK_Q=16, BLOCK_C=64)
    return y


def reference(f, p, s, n, eps=1e-2):
    w = 1 / ((p[:, None, :] - s[n]).pow(2).sum(-1) + eps)
    return (w[:, :, None] * f[n]).sum(1) / w.sum(1, keepdim=True)


SWEEP = [{"Q": 65536, "S": 16384, "C": 128, "K": 3}, {"Q": 20011, "S": 3000, "C": 70, "K": 8}]
SWEEP_CPU = [{"Q": 37, "S": 19, "C": 22, "K": 3}, {"Q": 20, "S": 5, "C": 90, "K": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    f = torch.randn(dims["S"], dims["C"], device=device, dtype=dtype)
    p = torch.randn(dims["Q"], 3, device=device, dtype=dtype)
    s = torch.randn(dims["S"], 3, device=device, dtype=dtype)
    n = torch.randint(0, dims["S"], (dims["Q"], dims["K"]), device=device)
    return f, p, s, n


# ---- backward ----


@triton.jit
def query_kernel(
    f_ptr, p_ptr, s_ptr, n_ptr, dy_ptr, dp_ptr, a_ptr, h_ptr, Q, K, C, eps,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lanes, xyz = tl.arange(0, BLOCK_K), tl.arange(0, 4)
    p = load_rows(p_ptr, q, xyz, q < Q, 3)
    w = tl.zeros([BLOCK_Q, BLOCK_K], dtype=tl.float32)
    products = tl.zeros([BLOCK_Q, BLOCK_K], dtype=tl.float32)
    for k in range(K):
        n, _, w_k = weight_of(p, s_ptr, n_ptr, q, k, Q, K, eps)
        product = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            product += load_rows(dy_ptr, q, c, q < Q, C) * load_rows(f_ptr, n, c, q < Q, C)
        w = tl.where(lanes[None, :] == k, w_k[:, None], w)
        products = tl.where(lanes[None, :] == k, tl.sum(product, axis=1)[:, None], products)
    a = w / tl.sum(w, axis=1)[:, None]
    h = -2 * w * a * (products - tl.sum(a * products, axis=1)[:, None])
    mask = (q[:, None] < Q) & (lanes[None, :] < K)
    edges = q[:, None].to(tl.int64) * K + lanes[None, :]
    tl.store(a_ptr + edges, a, mask=mask)
    tl.store(h_ptr + edges, h, mask=mask)
    dp = tl.zeros([BLOCK_Q, 4], dtype=tl.float32)
    for k in range(K):
        _, u, _ = weight_of(p, s_ptr, n_ptr, q, k, Q, K, eps)
        dp += tl.sum(tl.where(lanes[None, :] == k, h, 0.0), axis=1)[:, None] * u
    dp_mask = (q[:, None] < Q) & (xyz[None, :] < 3)
    tl.store(dp_ptr + q[:, None].to(tl.int64) * 3 + xyz[None, :], dp, mask=dp_mask)


@triton.jit
def source_kernel(
    p_ptr, s_ptr, a_ptr, h_ptr, dy_ptr, edge_ptr, first_ptr, df_ptr, ds_ptr, K, C,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    xyz = tl.arange(0, 4)
    end = tl.load(first_ptr + j + 1)
    s = tl.load(s_ptr + j * 3 + xyz, mask=xyz < 3, other=0.0)
    df = tl.zeros([BLOCK_E, BLOCK_C], dtype=tl.float32)
    ds = tl.zeros([BLOCK_E, 4], dtype=tl.float32)
    for start in range(tl.load(first_ptr + j), end, BLOCK_E):
        slot = start + tl.arange(0, BLOCK_E)
        edge = tl.load(edge_ptr + slot, mask=slot < end, other=0)
        a = tl.load(a_ptr + edge, mask=slot < end, other=0.0)
        h = tl.load(h_ptr + edge, mask=slot < end, other=0.0)
        df += a[:, None] * load_rows(dy_ptr, edge // K, c, slot < end, C)
        ds -= h[:, None] * (load_rows(p_ptr, edge // K, xyz, slot < end, 3) - s[None, :])
    tl.store(df_ptr + j * C + c, tl.sum(df, axis=0), mask=c < C)
    if tl.program_id(1) == 0:
        tl.store(ds_ptr + j * 3 + xyz, tl.sum(ds, axis=0), mask=xyz < 3)


class KNNInterpolate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, p, s, n, eps):
        f, p, s, n = (tensor.contiguous() for tensor in (f, p, s, n))
        ctx.save_for_backward(f, p, s, n)
        ctx.eps = eps
        return knn_interpolate(f, p, s, n, eps)

    @staticmethod
    def backward(ctx, dy):
        f, p, s, n = ctx.saved_tensors
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        (Q, K), (S, C) = n.shape, f.shape
        df, dp, ds = torch.empty_like(f), torch.empty_like(p), torch.empty_like(s)
        a, h = (torch.empty((Q, K), device=f.device, dtype=torch.float32) for _ in range(2))
        blocks = {"BLOCK_Q": 16, "BLOCK_K": triton.next_power_of_2(K), "BLOCK_C": 64}
        query_kernel[(triton.cdiv(Q, 16),)](f, p, s, n, dy, dp, a, h, Q, K, C, ctx.eps, **blocks)
        if needs[0] or needs[2]:
            owners, edges = torch.sort(n.view(-1))
            first = torch.searchsorted(owners, torch.arange(S + 1, device=n.device))
            grid = (S, max(1, triton.cdiv(C, 64)))
            source_kernel[grid](p, s, a, h, dy, edges, first, df, ds, K, C, BLOCK_E=16, BLOCK_C=64)
        return df if needs[0] else None, dp if needs[1] else None, ds if needs[2] else None, None, None


def knn_interpolate_autograd(f, p, s, n, eps=1e-2):
    return KNNInterpolate.apply(f, p, s, n, eps)
