"""Causal attention that rotates its queries and keys itself, on half-split channels.

Forward    q'_i = R_i q_i,  k'_j = R_j k_j,  with R_i (x1, x2) = (x1 c_i - x2 s_i, x2 c_i + x1 s_i)
           S_ij = <q'_i, k'_j> / sqrt(D) for j <= i,  P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,
           dq'_i = sum_j dS_ij k'_j / sqrt(D),   dk'_j = sum_i dS_ij q'_i / sqrt(D),
           dq_i = R_i^T dq'_i,   dk_j = R_j^T dk'_j
           R_i^T stands before the sum over j, so it is applied once to the finished sum; a rotation is
           orthogonal, and R_i^T is the rotation with -s.

Forward schedule: a program owns a query tile and walks the keys up to the diagonal. A head is held as its
two halves, so that a rotation is elementwise, and a score is the sum of two dots over D/2. The queries are
rotated once, each key tile when it is loaded; rotated q and k never reach memory. lse is saved, in units of
log2.
Backward schedule: the two owners of flash attention, dK and dV by key tiles and dQ by query tiles, with P
rebuilt from lse. Each rotates the walked operand on load, as the forward does, and accumulates in rotated
space; the inverse rotation is an epilogue on the accumulators, in fp32, at one read of the tables. Against
rope and attention as two functions this saves four tensors of the size of q, two of them saved ones.

op: rope_attention
schedule: swap_owner, recompute_from_stats
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
    """Tiles and the precision of dots."""
    D = q.shape[3]
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_H, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in (D // 2, D))
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_H": BLOCK_H, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, N, D, LIMIT):
    """Columns below LIMIT of the rows of an (N, D) matrix."""
    mask = (rows[:, None] < N) & (cols[None, :] < LIMIT)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D, LIMIT):
    mask = (rows[:, None] < N) & (cols[None, :] < LIMIT)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rotated(ptr, cos_ptr, sin_ptr, rows, h, N, D):
    """Both halves of R x, in the dtype of x."""
    c = load_tile(cos_ptr, rows, h, N, D // 2, D // 2).to(tl.float32)
    s = load_tile(sin_ptr, rows, h, N, D // 2, D // 2).to(tl.float32)
    x1 = load_tile(ptr, rows, h, N, D, D // 2)
    x2 = load_tile(ptr + D // 2, rows, h, N, D, D // 2)
    y1 = x1.to(tl.float32) * c - x2.to(tl.float32) * s
    y2 = x2.to(tl.float32) * c + x1.to(tl.float32) * s
    return y1.to(x1.dtype), y2.to(x2.dtype)


@triton.jit
def store_unrotated(ptr, cos_ptr, sin_ptr, y1, y2, rows, h, N, D):
    """R^T y from both halves of y."""
    c = load_tile(cos_ptr, rows, h, N, D // 2, D // 2).to(tl.float32)
    s = load_tile(sin_ptr, rows, h, N, D // 2, D // 2).to(tl.float32)
    store_tile(ptr, y1 * c + y2 * s, rows, h, N, D, D // 2)
    store_tile(ptr + D // 2, y2 * c - y1 * s, rows, h, N, D, D // 2)


@triton.jit
def score_tile(q1, q2, k1, k2, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    return tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION) * scale_log2


@triton.jit
def rope_attention_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, o_ptr, lse_ptr, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q1, q2 = load_rotated(q_ptr + head * D, cos_ptr, sin_ptr, rows, h, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k1, k2 = load_rotated(k_ptr + head * D, cos_ptr, sin_ptr, cols, h, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D, D)
        s = score_tile(q1, q2, k1, k2, scale_log2, PRECISION)
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def rope_attention_forward(q, k, v, cos, sin):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or D % 2 or cos.shape != (N, D // 2) or sin.shape != cos.shape:
        raise ValueError("q, k and v must have one shape with an even last size, and tables be (N, D / 2)")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    rope_attention_kernel[(triton.cdiv(N, 32), B * H)](
        q, k, v, cos, sin, o, lse, N, D, D**-0.5 * LOG2E, **tiling(q)
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def rope_attention(q, k, v, cos, sin):
    """q, k, v: (B, H, N, D), D even; cos, sin: (N, D / 2)."""
    return rope_attention_forward(*(x.contiguous() for x in (q, k, v, cos, sin)))[0]


def reference(q, k, v, cos, sin):
    def rotate(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    s = rotate(q) @ rotate(k).transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(future, -float("inf")), dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 8, "N": 2039, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 46, "D": 32}, {"B": 2, "H": 1, "N": 67, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, D = dims["N"], dims["D"]
    q, k, v = (torch.randn(dims["B"], dims["H"], N, D, device=device, dtype=dtype) for _ in range(3))
    frequency = 10000.0 ** (-torch.arange(D // 2, device=device) / max(1, D // 2))
    angle = torch.arange(N, device=device)[:, None] * frequency
    return q, k, v, angle.cos().to(dtype), angle.sin().to(dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=0))


@triton.jit
def rebuild_p_ds(q1, q2, k1, k2, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    s = score_tile(q1, q2, k1, k2, scale_log2, PRECISION)
    seen = (rows[:, None] < N) & (cols[None, :] <= rows[:, None])
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D,
    scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    k1, k2 = load_rotated(k_ptr + head * D, cos_ptr, sin_ptr, cols, h, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D, D)
    dk1 = tl.zeros([BLOCK, BLOCK_H], dtype=tl.float32)
    dk2 = tl.zeros([BLOCK, BLOCK_H], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q1, q2 = load_rotated(q_ptr + head * D, cos_ptr, sin_ptr, rows, h, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q1, q2, k1, k2, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = tl.trans(ds.to(q1.dtype))
        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
        dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
    store_unrotated(dk_ptr + head * D, cos_ptr, sin_ptr, dk1 * scale, dk2 * scale, cols, h, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D, D)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q1, q2 = load_rotated(q_ptr + head * D, cos_ptr, sin_ptr, rows, h, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq1 = tl.zeros([BLOCK, BLOCK_H], dtype=tl.float32)
    dq2 = tl.zeros([BLOCK, BLOCK_H], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k1, k2 = load_rotated(k_ptr + head * D, cos_ptr, sin_ptr, cols, h, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D, D)
        _, ds = rebuild_p_ds(q1, q2, k1, k2, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dq1 = tl.dot(ds.to(k1.dtype), k1, dq1, input_precision=PRECISION)
        dq2 = tl.dot(ds.to(k2.dtype), k2, dq2, input_precision=PRECISION)
    store_unrotated(dq_ptr + head * D, cos_ptr, sin_ptr, dq1 * scale, dq2 * scale, rows, h, N, D)


class RopeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cos, sin):
        inputs = tuple(x.contiguous() for x in (q, k, v, cos, sin))
        o, lse = rope_attention_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, cos, sin, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        tiles, grid, needed = tiling(q), (triton.cdiv(N, 32), B * H), ctx.needs_input_grad
        scales = (D**-0.5, D**-0.5 * LOG2E)
        delta = torch.empty_like(lse)
        delta_kernel[(B * H * N,)](o, do, delta, D, BLOCK_D=tiles["BLOCK_D"])
        dq = dk = dv = None
        if needed[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](q, k, v, cos, sin, do, lse, delta, dq, N, D, *scales, **tiles)
        if needed[1] or needed[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, cos, sin, do, lse, delta, dk, dv, N, D, *scales, **tiles)
        return dq, dk if needed[1] else None, dv if needed[2] else None, None, None


def rope_attention_autograd(q, k, v, cos, sin):
    return RopeAttention.apply(q, k, v, cos, sin)
