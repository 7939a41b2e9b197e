"""Attention with a learned vector for each relative position up to C, the same for all that are further.

Forward    clip(x) = min(max(x, -C), C),  E_ic = <q_i, r_c> for c = 0 .. 2 C,
           S_ij = s (<q_i, k_j> + E_{i, clip(j - i) + C}),  P = softmax(S),  O = P V;  r is one for all heads
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dK = s dS^T Q,
           dE_ic = s sum of dS_ij over the j with clip(j - i) + C = c,
           dQ = s dS K + dE R,   dR = sum over batch, heads and queries of dE^T Q

Forward schedule: E is made first, a product a tile of queries, 2 C + 1 numbers a row: each r_c is met by N
queries and each E_ic is read where it is wanted. A program then owns a query tile, walks the keys, and reads
E by index. lse is saved, in units of log2.
Backward schedule: the index is a map from N keys to 2 C + 1 columns of a row. Between the clips it is one to
one, so the owner of a query tile stores those dS where E was read, each address once; a column that no key
meets gets a 0. The two clipped columns take sums: they stay in registers as row sums over the keys beyond,
and are stored at the end. Then the program reads its own rows of dE back and adds dE R to dQ. dR is a product
over all rows of all heads, so it is split: a program takes a stretch of rows and stores a part, and a last
kernel adds the parts. Key tiles own dK and dV. No program adds to an address of another.

op: relative_key_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q, r):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D, BLOCK_C = (max(16, triton.next_power_of_2(size)) for size in (q.shape[-1], r.shape[0]))
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_D": BLOCK_D, "BLOCK_C": BLOCK_C}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def relative_scores_kernel(
    q_ptr, r_ptr, e_ptr, R, D, W,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    q, r = load_tile(q_ptr, rows, d, R, D), load_tile(r_ptr, c, d, W, D)
    store_tile(e_ptr, tl.dot(q, tl.trans(r), input_precision=PRECISION), rows, c, R, W)


@triton.jit
def scores(q, k, e_ptr, rows, cols, N, C, scale_log2, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2, -inf beyond the last key."""
    c = tl.minimum(tl.maximum(cols[None, :] - rows[:, None], -C), C) + C
    e = tl.load(e_ptr + rows[:, None] * (2 * C + 1) + c, mask=rows[:, None] < N, other=0.0)
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) + e) * scale_log2
    return tl.where(cols[None, :] < N, s, -float("inf"))


@triton.jit
def relative_kernel(
    q_ptr, k_ptr, v_ptr, e_ptr, o_ptr, lse_ptr, N, D, C, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = scores(q, k, e_ptr + head * (2 * C + 1), rows, cols, N, C, scale_log2, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def relative_forward(q, k, v, r):
    (B, H, N, D), W = q.shape, r.shape[0]
    if not q.shape == k.shape == v.shape or r.shape != (W, D) or W % 2 == 0:
        raise ValueError("q, k and v must have one shape, and r an odd number of rows of theirs")
    if D > 128 or W > 129:
        raise ValueError(f"{W} vectors of dimension {D} do not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q, r)
    e, lse = q.new_empty((B, H, N, W)), q.new_empty((B, H, N))
    relative_scores_kernel[(triton.cdiv(B * H * N, 32),)](q, r, e, B * H * N, D, W, **tiles)
    tiles.pop("BLOCK_C")
    relative_kernel[(triton.cdiv(N, 32), B * H)](q, k, v, e, o, lse, N, D, W // 2, D**-0.5 * LOG2E, **tiles)
    return o, e, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def relative_key_attention(q, k, v, r):
    """q, k, v: (batch, heads, tokens, dim); r: (2 C + 1, dim)."""
    return relative_forward(q.contiguous(), k.contiguous(), v.contiguous(), r.contiguous())[0]


def reference(q, k, v, r):
    N, D = q.shape[-2:]
    C, i = r.shape[0] // 2, torch.arange(N, device=q.device)
    at = (i - i[:, None]).clamp(-C, C) + C
    s = torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,ijd->bhij", q, r[at])
    return torch.softmax(D**-0.5 * s, dim=-1) @ v


SWEEP = [{"B": 4, "H": 8, "N": 1024, "C": 16, "D": 64}, {"B": 2, "H": 4, "N": 777, "C": 60, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 30, "C": 4, "D": 16}, {"B": 2, "H": 1, "N": 40, "C": 35, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, C, D = (dims[key] for key in ("B", "H", "N", "C", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(2 * C + 1, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, e_ptr, rows, cols, N, C, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, e_ptr, rows, cols, N, C, scale_log2, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, e_ptr, r_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, de_ptr, N, D, C, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    W = 2 * C + 1
    e_ptr += head * W
    de_ptr += head * W
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    before = tl.zeros([BLOCK], dtype=tl.float32)
    after = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, e_ptr, rows, cols, N, C, scale_log2, PRECISION)
        ds *= scale
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        x = cols[None, :] - rows[:, None]
        before += tl.sum(tl.where(x <= -C, ds, 0.0), axis=1)
        after += tl.sum(tl.where((x >= C) & (x > -C), ds, 0.0), axis=1)
        between = (x > -C) & (x < C) & (rows[:, None] < N) & (cols[None, :] < N)
        tl.store(de_ptr + rows[:, None] * W + x + C, ds, mask=between)
    j = rows[:, None] + c[None, :] - C
    ends = tl.where(c[None, :] == 0, before[:, None], 0.0) + tl.where(
        c[None, :] == W - 1, after[:, None], 0.0
    )
    inner = (c[None, :] > 0) & (c[None, :] < W - 1)
    stored = inner & (j >= 0) & (j < N) & (rows[:, None] < N)
    tl.debug_barrier()  # what follows reads what other threads of the program stored
    de = tl.load(de_ptr + rows[:, None] * W + c[None, :], mask=stored, other=0.0) + ends
    tl.debug_barrier()
    store_tile(de_ptr, de, rows, c, N, W)
    dq = tl.dot(de, load_tile(r_ptr, c, d, W, D), dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, e_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, C, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(
            q, k, v, do, lse, delta, e_ptr + head * (2 * C + 1), rows, cols, N, C, scale_log2, PRECISION
        )
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dr_kernel(
    q_ptr, de_ptr, parts_ptr, R, D, W, SPLIT,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    begin = tl.program_id(0).to(tl.int64) * SPLIT
    dr = tl.zeros([BLOCK_C, BLOCK_D], dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, R), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        de = load_tile(de_ptr, rows, c, R, W)
        dr = tl.dot(tl.trans(de), load_tile(q_ptr, rows, d, R, D), dr, input_precision=PRECISION)
    store_tile(parts_ptr + tl.program_id(0) * W * D, dr, c, d, W, D)


@triton.jit
def parts_sum_kernel(parts_ptr, total_ptr, G, size, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_G, BLOCK], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        acc += load_tile(parts_ptr, start + tl.arange(0, BLOCK_G), at, G, size)
    tl.store(total_ptr + at, tl.sum(acc, axis=0), mask=at < size)


class RelativeKeyAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, r):
        q, k, v, r = q.contiguous(), k.contiguous(), v.contiguous(), r.contiguous()
        o, e, lse = relative_forward(q, k, v, r)
        ctx.save_for_backward(q, k, v, r, o, e, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, r, o, e, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), W, tiles, R = q.shape, r.shape[0], tiling(q, r), lse.numel()
        BLOCK_C, grid = tiles.pop("BLOCK_C"), (triton.cdiv(N, 32), B * H)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(R, 32),)](o, do, delta, R, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"])
        sizes = (N, D, W // 2, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = dr = None
        if needs[0] or needs[3]:
            dq, de = torch.empty_like(q), torch.empty_like(e)
            query_kernel[grid](q, k, v, e, r, do, lse, delta, dq, de, *sizes, BLOCK_C=BLOCK_C, **tiles)
            if needs[3]:
                G, dr = triton.cdiv(R, 1024), torch.empty_like(r)
                parts = lse.new_empty((G, W, D))
                dr_kernel[(G,)](q, de, parts, R, D, W, 1024, BLOCK_C=BLOCK_C, **tiles)
                parts_sum_kernel[(triton.cdiv(W * D, 64),)](parts, dr, G, W * D, BLOCK_G=16, BLOCK=64)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, e, do, lse, delta, dk, dv, *sizes, **tiles)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dr


def relative_key_attention_autograd(q, k, v, r):
    return RelativeKeyAttention.apply(q, k, v, r)
