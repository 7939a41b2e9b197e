"""Invariant point attention: residues attend by features, by distances in space and by the pair map.

Forward    a head h:  S_ij = s <q_i, k_j> - (w_h / 2) Y_ij + B_ij,  Y_ij = sum_e (a_ie - b_je)^2,
           P = softmax(S),  O = P V;  a and b are query and key points in one frame, E = 3 x points numbers
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           dB_ij = dS_ij,
           da_ie = -w sum_j dS_ij (a_ie - b_je),   db_je = w sum_i dS_ij (a_ie - b_je),
           dw_h = -(1 / 2) sum_ij dS_ij Y_ij

Forward schedule: a program owns a query tile and walks the keys with an online softmax. The squared distances
are made coordinate by coordinate, a column of a against a row of b: as |a|^2 + |b|^2 - 2 <a, b> they would
take a dot, and cancel: coordinates are far from the origin and points of interest close to each other. lse is
saved, in units of log2.
Backward schedule: query tiles own dQ and da, key tiles own dK, dV and db; both rebuild S with its three
terms. The bias belongs to one pair of residues, so the query tile's owner stores each dS it makes where B was
read: that is dB, and nobody else writes there. It also sums dS * Y, its share of dw, into a slot of (head,
tile); a last kernel adds the slots. A coordinate's difference is made again for da, a subtraction in
registers.

op: point_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


def tiling(q, v):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D, BLOCK_V = (max(16, triton.next_power_of_2(tensor.shape[-1])) for tensor in (q, v))
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_D": BLOCK_D, "BLOCK_V": BLOCK_V}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def difference(a_ptr, b_ptr, rows, cols, e, N, E):
    """a_ie - b_je of one coordinate e, for a tile."""
    a = tl.load(a_ptr + rows * E + e, mask=rows < N, other=0.0)
    b = tl.load(b_ptr + cols * E + e, mask=cols < N, other=0.0)
    return a[:, None] - b[None, :]


@triton.jit
def scores(
    q, k, a_ptr, b_ptr, bias_ptr, w, rows, cols, N, E, scale, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    """S of one tile, -inf beyond the last key, and the squared distances Y."""
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for e in range(E):
        gap = difference(a_ptr, b_ptr, rows, cols, e, N, E)
        y += gap * gap
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - 0.5 * w * y
    s += load_tile(bias_ptr, rows, cols, N, N)
    return tl.where(cols[None, :] < N, s, -float("inf")), y


@triton.jit
def point_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, bias_ptr, w_ptr, o_ptr, lse_ptr, H, N, D, V, E, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    w = tl.load(w_ptr + tl.program_id(1) % H)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_V)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * V, cols, c, N, V)
        s, _ = scores(
            q, k, a_ptr + head * E, b_ptr + head * E, bias_ptr + head * N, w, rows, cols, N, E, scale,
            PRECISION, BLOCK,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2((s - m_new[:, None]) * LOG2E)
        rescale = tl.exp2((m - m_new) * LOG2E)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * V, acc / total[:, None], rows, c, N, V)
    tl.store(lse_ptr + head + rows, m + tl.log(total), mask=rows < N)


def point_forward(q, k, v, a, b, bias, w):
    (B, H, N, D), V, E = q.shape, v.shape[3], a.shape[3]
    if k.shape != q.shape or v.shape != (B, H, N, V) or not a.shape == b.shape == (B, H, N, E):
        raise ValueError("keys, values or points do not fit q")
    if bias.shape != (B, H, N, N) or w.shape != (H,) or max(D, V) > 128:
        raise ValueError("bias or w do not fit q, or a row does not fit one tile")
    o, tiles = torch.empty_like(v), tiling(q, v)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    point_kernel[grid](q, k, v, a, b, bias, w, o, lse, H, N, D, V, E, D**-0.5, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5, 6))
def point_attention(q, k, v, a, b, bias, w):
    """q, k: (batch, heads, N, D); v: (batch, heads, N, V); a, b: (batch, heads, N, E); bias: (batch, heads,
    N, N); w: (heads).
    """
    return point_forward(*(tensor.contiguous() for tensor in (q, k, v, a, b, bias, w)))[0]


def reference(q, k, v, a, b, bias, w):
    y = (a[:, :, :, None] - b[:, :, None]).pow(2).sum(-1)
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) - 0.5 * w[:, None, None] * y + bias
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 1, "H": 12, "N": 512, "D": 16, "V": 40, "P": 4},
    {"B": 2, "H": 4, "N": 389, "D": 32, "V": 64, "P": 8},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "N": 23, "D": 16, "V": 20, "P": 2},
    {"B": 2, "H": 1, "N": 34, "D": 8, "V": 9, "P": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D, V, P = (dims[key] for key in ("B", "H", "N", "D", "V", "P"))
    widths = (D, D, V, 3 * P, 3 * P, N)
    q, k, v, a, b, bias = (torch.randn(B, H, N, width, device=device, dtype=dtype) for width in widths)
    return q, k, v, a, b, bias, 0.1 + 0.2 * torch.rand(H, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(
    q, k, v, do, lse, delta, a_ptr, b_ptr, bias_ptr, w, rows, cols, N, E, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """P, dS and Y of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s, y = scores(q, k, a_ptr, b_ptr, bias_ptr, w, rows, cols, N, E, scale, PRECISION, BLOCK)
    p = tl.exp2((s - lse[:, None]) * LOG2E)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None]), y


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, bias_ptr, w_ptr, do_ptr, lse_ptr, delta_ptr,
    dq_ptr, da_ptr, dbias_ptr, slots_ptr, H, N, D, V, E, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    w = tl.load(w_ptr + tl.program_id(1) % H)
    a_ptr += head * E
    b_ptr += head * E
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c, lane = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_E)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * V, rows, c, N, V)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    da = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * V, cols, c, N, V)
        _, ds, y = rebuild_p_ds(
            q, k, v, do, lse, delta, a_ptr, b_ptr, bias_ptr + head * N, w, rows, cols, N, E, scale,
            PRECISION, BLOCK,
        )  # fmt: skip
        store_tile(dbias_ptr + head * N, ds, rows, cols, N, N)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        dw += tl.sum(ds * y, axis=1)
        for e in range(E):
            along = tl.sum(ds * difference(a_ptr, b_ptr, rows, cols, e, N, E), axis=1)
            da += tl.where(lane[None, :] == e, along[:, None], 0.0)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)
    store_tile(da_ptr + head * E, da * -w, rows, lane, N, E)
    slot = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(slots_ptr + slot, -0.5 * tl.sum(dw))


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, bias_ptr, w_ptr, do_ptr, lse_ptr, delta_ptr,
    dk_ptr, dv_ptr, db_ptr, H, N, D, V, E, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    w = tl.load(w_ptr + tl.program_id(1) % H)
    a_ptr += head * E
    b_ptr += head * E
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c, lane = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_E)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * V, cols, c, N, V)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    db = tl.zeros([BLOCK, BLOCK_E], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * V, rows, c, N, V)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds, _ = rebuild_p_ds(
            q, k, v, do, lse, delta, a_ptr, b_ptr, bias_ptr + head * N, w, rows, cols, N, E, scale,
            PRECISION, BLOCK,
        )  # fmt: skip
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        for e in range(E):
            along = tl.sum(ds * difference(a_ptr, b_ptr, rows, cols, e, N, E), axis=0)
            db += tl.where(lane[None, :] == e, along[:, None], 0.0)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * V, dv, cols, c, N, V)
    store_tile(db_ptr + head * E, db * w, cols, lane, N, E)


@triton.jit
def dw_kernel(slots_ptr, dw_ptr, B, H, T, BLOCK: tl.constexpr):
    """Sum of slots (B, H, T) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(slots_ptr + (i // T * H + h) * T + i % T, mask=i < B * T, other=0.0)
    tl.store(dw_ptr + h, tl.sum(acc))


class PointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, a, b, bias, w):
        inputs = tuple(tensor.contiguous() for tensor in (q, k, v, a, b, bias, w))
        o, lse = point_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        *inputs, o, lse = ctx.saved_tensors
        q, _, v, a, *_ = inputs
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), V, E, tiles = q.shape, v.shape[3], a.shape[3], tiling(q, v)
        T = triton.cdiv(N, tiles["BLOCK"])
        delta, slots = torch.empty_like(lse), lse.new_empty((B, H, T))
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, V, BLOCK=32, BLOCK_D=tiles["BLOCK_V"]
        )
        grads = [torch.empty_like(tensor) for tensor in inputs]
        dq, dk, dv, da, db, dbias, dw = grads
        seen, sizes = (*inputs, do, lse, delta), (H, N, D, V, E, D**-0.5)
        tiles["BLOCK_E"] = triton.next_power_of_2(E)
        if needs[0] or needs[3] or needs[5] or needs[6]:
            query_kernel[(T, B * H)](*seen, dq, da, dbias, slots, *sizes, **tiles)
        if needs[1] or needs[2] or needs[4]:
            key_kernel[(T, B * H)](*seen, dk, dv, db, *sizes, **tiles)
        if needs[6]:
            dw_kernel[(H,)](slots, dw, B, H, T, BLOCK=64)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def point_attention_autograd(q, k, v, a, b, bias, w):
    return PointAttention.apply(q, k, v, a, b, bias, w)
