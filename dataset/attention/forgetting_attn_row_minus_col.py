"""Causal softmax attention with a forget gate: logits fall by the gates between key and query.

Forward    c_t = logf_1 + .. + logf_t,   S_ij = <q_i, k_j> / sqrt(D) + c_i - c_j for j <= i,
           P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,
           dQ = dS K / sqrt(D),  dK = dS^T Q / sqrt(D).
           c_i stands in row i with a plus, c_j in column j with a minus:  dc = rowsum(dS) - colsum(dS),
           and c is a prefix sum:  dlogf_t = dc_t + dc_{t+1} + ..

Forward schedule: one program a head makes c; then a program owns a query tile and walks the keys up to the
diagonal, adding the two vectors of c to the tile of scores; no bias matrix exists. c and lse are saved, both
in units of log2.
Backward schedule: the two owners of flash attention hold exactly what dc needs, without a dot more: the query
tile's owner has whole rows of dS and stores their sums, the key tile's owner has whole columns. One scan from
the end makes dlogf. In exact numbers the row sums are 0, as a constant added to a row leaves its softmax
alone; they are made all the same, since delta comes from a rounded O: in the suffix sum, dS of the pairs with
both i and j at or after t appears once with either sign and drops out, rounding and all, and only pairs that
the gate t lies between are left. Without the rows, what is left of them would grow with the length.

op: forgetting_attention
schedule: swap_owner, reverse_scan, recompute_from_stats
difficulty: 5
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
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(ptr, rows, N):
    return tl.load(ptr + rows, mask=rows < N, other=0.0)


@triton.jit
def prefix_kernel(logf_ptr, c_ptr, N, scale, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * N
    carry = 0.0
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        logf = load_row(logf_ptr + head, rows, N).to(tl.float32)
        tl.store(c_ptr + head + rows, (carry + tl.cumsum(logf, axis=0)) * scale, mask=rows < N)
        carry += tl.sum(logf, axis=0)


@triton.jit
def score_tile(q, k, c_rows, c_cols, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    """Scores in units of log2, -inf where a key is in the future or a query outside."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    seen = (rows[:, None] < N) & (cols[None, :] <= rows[:, None])
    return tl.where(seen, s + (c_rows[:, None] - c_cols[None, :]), -float("inf"))


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, o_ptr, lse_ptr, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    c = load_row(c_ptr + head, rows, N)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = score_tile(q, k, c, load_row(c_ptr + head, cols, N), rows, cols, N, scale_log2, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(rows < N, total, 1.0)
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def forgetting_attention_forward(q, k, v, logf):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or logf.shape != (B, H, N):
        raise ValueError("q, k and v must have one shape, and logf its first three sizes")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    c, lse = (torch.empty((B, H, N), device=q.device, dtype=torch.float32) for _ in range(2))
    prefix_kernel[(B * H,)](logf, c, N, LOG2E, BLOCK=256)
    attention_kernel[(triton.cdiv(N, 32), B * H)](q, k, v, c, o, lse, N, D, D**-0.5 * LOG2E, **tiling(q))
    return o, c, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def forgetting_attention(q, k, v, logf):
    """q, k, v: (B, H, N, D); logf: (B, H, N), the logarithm of the gate, at most 0."""
    return forgetting_attention_forward(*(tensor.contiguous() for tensor in (q, k, v, logf)))[0]


def reference(q, k, v, logf):
    c = logf.cumsum(-1)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + c[..., :, None] - c[..., None, :]
    future = torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(future, -float("inf")), dim=-1) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 8, "N": 2039, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 41, "D": 16}, {"B": 2, "H": 1, "N": 290, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(4 + torch.randn(shape[:3], device=device, dtype=dtype))


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=0))


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, column_ptr, N, D,
    scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK, dV and the column sums of dS."""
    head = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    c_cols = load_row(c_ptr + head, cols, N)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    column = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        c_rows = load_row(c_ptr + head, rows, N)
        s = score_tile(q, k, c_rows, c_cols, rows, cols, N, scale_log2, PRECISION)
        p = tl.exp2(s - load_row(lse_ptr + head, rows, N)[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - load_row(delta_ptr + head, rows, N)[:, None])
        column += tl.sum(ds, axis=0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)
    tl.store(column_ptr + head + cols, column, mask=cols < N)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, row_ptr, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ and the row sums of dS."""
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    c_rows = load_row(c_ptr + head, rows, N)
    lse = load_row(lse_ptr + head, rows, N)
    delta = load_row(delta_ptr + head, rows, N)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    row = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        c_cols = load_row(c_ptr + head, cols, N)
        s = score_tile(q, k, c_rows, c_cols, rows, cols, N, scale_log2, PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = tl.exp2(s - lse[:, None]) * (dp - delta[:, None])
        row += tl.sum(ds, axis=1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)
    tl.store(row_ptr + head + rows, row, mask=rows < N)


@triton.jit
def suffix_kernel(row_ptr, column_ptr, dlogf_ptr, N, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * N
    carry = 0.0
    for step in range(tl.cdiv(N, BLOCK)):
        rows = (tl.cdiv(N, BLOCK) - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        dc = load_row(row_ptr + head, rows, N) - load_row(column_ptr + head, rows, N)
        carry += tl.sum(dc, axis=0)
        dlogf = carry - tl.cumsum(dc, axis=0) + dc
        tl.store(dlogf_ptr + head + rows, dlogf.to(dlogf_ptr.dtype.element_ty), mask=rows < N)


class ForgettingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, logf):
        q, k, v, logf = q.contiguous(), k.contiguous(), v.contiguous(), logf.contiguous()
        o, c, lse = forgetting_attention_forward(q, k, v, logf)
        ctx.save_for_backward(q, k, v, o, c, lse)
        ctx.logf_dtype = logf.dtype
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, c, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        tiles, grid, needed = tiling(q), (triton.cdiv(N, 32), B * H), ctx.needs_input_grad
        sizes = (N, D, D**-0.5, D**-0.5 * LOG2E)
        delta, row, column = (torch.empty_like(lse) for _ in range(3))
        delta_kernel[(B * H * N,)](o, do, delta, D, BLOCK_D=tiles["BLOCK_D"])
        dq = dk = dv = dlogf = None
        if needed[0] or needed[3]:
            dq = torch.empty_like(q)
            query_kernel[grid](q, k, v, c, do, lse, delta, dq, row, *sizes, **tiles)
        if needed[1] or needed[2] or needed[3]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, c, do, lse, delta, dk, dv, column, *sizes, **tiles)
        if needed[3]:
            dlogf = torch.empty((B, H, N), device=q.device, dtype=ctx.logf_dtype)
            suffix_kernel[(B * H,)](row, column, dlogf, N, BLOCK=256)
        grads = zip((dq, dk, dv, dlogf), needed, strict=True)
        return tuple(grad if wanted else None for grad, wanted in grads)


def forgetting_attention_autograd(q, k, v, logf):
    return ForgettingAttention.apply(q, k, v, logf)
