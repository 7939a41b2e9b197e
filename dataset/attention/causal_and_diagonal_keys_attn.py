"""Causal attention with a few keys of a token's own: what trains a draft model on its own earlier steps.

Forward    token i sees the keys j <= i of the sequence, and N more keys that are its alone, one of each
           earlier draft step:   s_ij = s <q_i, k_j>,  t_in = s <q_i, c_in>,   (P, R) = softmax((s, t)),
           o_i = sum_j P_ij v_j + sum_n R_in u_in
Backward   dP_ij = <do_i, v_j>,  dR_in = <do_i, u_in>,  delta_i = <do_i, o_i>;
           ds_ij = P_ij (dP_ij - delta_i),  dt_in = R_in (dR_in - delta_i);
           dq_i = s (sum_j ds_ij k_j + sum_n dt_in c_in);   dk_j = s sum_i ds_ij q_i,  dv_j = sum_i P_ij do_i;
           dc_in = s dt_in q_i,   du_in = R_in do_i

Forward schedule: a program owns a query tile. Its own keys are rows that line up with the queries, so their
scores are row sums and no dots; they come first, and give the online softmax a finite start. Then it walks
the sequence to the diagonal. lse is saved, in units of log2.
Backward schedule: a key of the sequence is met by many queries and has an owner that walks them. A token's
own keys are met by one query, so they stay with the query's owner: it makes dq, dc and du in one go, from q
and do in registers, and the part of dq that they give costs no second look. As T N more columns of a masked
score matrix they would be N T^2 scores of which T N count. One softmax, two ownerships, no atomics.

op: draft_step_attention
schedule: swap_owner, row_reduce_correct, recompute_from_stats
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
    """Tiles and the precision of dots; products of whole float32 numbers want small tiles."""
    single, BLOCK_D = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[3]))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": (32 if BLOCK_D <= 64 else 16) if single else 64,
        "BLOCK_D": BLOCK_D,
        "num_warps": 4 if single else 8,
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
def draft_attention_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, o_ptr, lse_ptr, N, T, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T * D
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head, rows, d, T, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for n in range(N):
        own = head * N + n * T * D
        c = load_tile(c_ptr + own, rows, d, T, D).to(tl.float32)
        u = load_tile(u_ptr + own, rows, d, T, D).to(tl.float32)
        t = tl.sum(q.to(tl.float32) * c, axis=1) * scale_log2
        m_new = tl.maximum(m, t)
        p, rescale = tl.exp2(t - m_new), tl.exp2(m - m_new)
        acc = acc * rescale[:, None] + p[:, None] * u
        total = total * rescale + p
        m = m_new
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head, cols, d, T, D)
        v = load_tile(v_ptr + head, cols, d, T, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p, rescale = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head, acc / total[:, None], rows, d, T, D)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * T + rows, m + tl.log2(total), mask=rows < T)


def draft_attention_forward(q, k, v, c, u):
    (B, H, T, D), N = q.shape, c.shape[2]
    if not q.shape == k.shape == v.shape or not c.shape == u.shape == (B, H, N, T, D):
        raise ValueError("q, k and v must have one shape, and c and u N of them a head")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    draft_attention_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H)](
        q, k, v, c, u, o, lse, N, T, D, D**-0.5 * LOG2E, **tiles
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def draft_attention(q, k, v, c, u):
    """q, k, v: (B, H, T, D), of the sequence; c, u: (B, H, N, T, D), keys and values of each token's own."""
    return draft_attention_forward(*(x.contiguous() for x in (q, k, v, c, u)))[0]


def reference(q, k, v, c, u):
    s = q @ k.transpose(-1, -2)
    future = torch.ones(s.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    own = (q[:, :, None] * c).sum(-1).transpose(-1, -2)
    scores = torch.cat([s.masked_fill(future, -float("inf")), own], dim=-1)
    p = torch.softmax(q.shape[-1] ** -0.5 * scores, dim=-1)
    T = q.shape[2]
    return p[..., :T] @ v + (p[..., T:].transpose(-1, -2)[..., None] * u).sum(2)


SWEEP = [
    {"B": 2, "H": 16, "T": 2048, "D": 128, "N": 3},
    {"B": 1, "H": 5, "T": 1021, "D": 80, "N": 6},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 37, "D": 16, "N": 2}, {"B": 1, "H": 1, "T": 33, "D": 20, "N": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D, N = (dims[name] for name in ("B", "H", "T", "D", "N"))
    q, k, v = (torch.randn(B, H, T, D, device=device, dtype=dtype) for _ in range(3))
    c, u = (torch.randn(B, H, N, T, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, c, u


# ---- backward ----


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    seen = (rows[:, None] < T) & (cols[None, :] <= rows[:, None])
    p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
    return p, p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dc_ptr, du_ptr,
    N, T, D, scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, and dc and du of the rows' own keys; stores delta for the owners of keys."""
    head = tl.program_id(1).to(tl.int64) * T * D
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head, rows, d, T, D)
    do = load_tile(do_ptr + head, rows, d, T, D)
    do32 = do.to(tl.float32)
    stats = tl.program_id(1).to(tl.int64) * T + rows
    lse = tl.load(lse_ptr + stats, mask=rows < T, other=0.0)
    delta = tl.sum(do32 * load_tile(o_ptr + head, rows, d, T, D).to(tl.float32), axis=1)
    tl.store(delta_ptr + stats, delta, mask=rows < T)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for n in range(N):
        own = head * N + n * T * D
        c = load_tile(c_ptr + own, rows, d, T, D).to(tl.float32)
        u = load_tile(u_ptr + own, rows, d, T, D).to(tl.float32)
        r = tl.exp2(tl.sum(q.to(tl.float32) * c, axis=1) * scale_log2 - lse)
        dt = r * (tl.sum(do32 * u, axis=1) - delta) * scale
        dq += dt[:, None] * c
        store_tile(dc_ptr + own, dt[:, None] * q.to(tl.float32), rows, d, T, D)
        store_tile(du_ptr + own, r[:, None] * do32, rows, d, T, D)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head, cols, d, T, D)
        v = load_tile(v_ptr + head, cols, d, T, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION)
        dq = tl.dot((ds * scale).to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head, dq, rows, d, T, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, T, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T * D
    stats = tl.program_id(1).to(tl.int64) * T
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head, cols, d, T, D)
    v = load_tile(v_ptr + head, cols, d, T, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head, rows, d, T, D)
        do = load_tile(do_ptr + head, rows, d, T, D)
        lse = tl.load(lse_ptr + stats + rows, mask=rows < T, other=0.0)
        delta = tl.load(delta_ptr + stats + rows, mask=rows < T, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, T, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head, dk * scale, cols, d, T, D)
    store_tile(dv_ptr + head, dv, cols, d, T, D)


class DraftAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(x.contiguous() for x in inputs)
        o, lse = draft_attention_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, c, u, o, lse = ctx.saved_tensors
        do, needs, tiles = do.contiguous(), ctx.needs_input_grad, tiling(q)
        (B, H, T, D), N = q.shape, c.shape[2]
        grid, scales = (triton.cdiv(T, tiles["BLOCK"]), B * H), (D**-0.5, D**-0.5 * LOG2E)
        dq, dk, dv, dc, du = (torch.empty_like(x) for x in (q, k, v, c, u))
        delta = torch.empty_like(lse)
        query_kernel[grid](q, k, v, c, u, o, do, lse, delta, dq, dc, du, N, T, D, *scales, **tiles)
        if needs[1] or needs[2]:
            key_kernel[grid](q, k, v, do, lse, delta, dk, dv, T, D, *scales, **tiles)
        grads = zip((dq, dk, dv, dc, du), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def draft_attention_autograd(q, k, v, c, u):
    return DraftAttention.apply(q, k, v, c, u)
