"""Causal attention inside the documents of a packed row: tiles without a common document are skipped.

Forward    P_ij = softmax over the j <= i with doc_j = doc_i of s <q_i, k_j>,  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           all of it 0 between documents

Forward schedule: a small kernel notes the least and the greatest document of each tile of tokens. A program
owns a query tile and goes over the key tiles up to the diagonal; where the two ranges do not meet, it takes
neither K nor V and does no dot. Ranges that meet prove nothing, so elements are masked as well: documents may
be numbered in any order, though sorted ones skip most. lse is saved, in units of log2.
Backward schedule: "the ranges meet" is symmetric, so the same list of ranges serves the owners of key tiles,
which go over the query tiles below for dK and dV, and those of query tiles for dQ. Both loops are as long as
in causal attention and nearly free where they skip; what is computed is the sum of the documents' squared
lengths, not the row's. Masks and ranges are rebuilt from N numbers, an N x N mask exists nowhere.

op: document_attention
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
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def range_kernel(doc_ptr, least_ptr, greatest_ptr, N, BLOCK: tl.constexpr):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    doc_ptr += tl.program_id(1).to(tl.int64) * N
    first = tl.load(doc_ptr + tl.program_id(0) * BLOCK)
    doc = tl.load(doc_ptr + tokens, mask=tokens < N, other=0)
    doc = tl.where(tokens < N, doc, first)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(least_ptr + place, tl.min(doc, axis=0))
    tl.store(greatest_ptr + place, tl.max(doc, axis=0))


@triton.jit
def meet(least_ptr, greatest_ptr, one, other):
    return (tl.load(least_ptr + one) <= tl.load(greatest_ptr + other)) & (
        tl.load(least_ptr + other) <= tl.load(greatest_ptr + one)
    )


@triton.jit
def document_kernel(
    q_ptr, k_ptr, v_ptr, doc_ptr, least_ptr, greatest_ptr, o_ptr, lse_ptr, H, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    batch = tl.program_id(1) // H
    doc_ptr += batch.to(tl.int64) * N
    least_ptr += batch * tl.num_programs(0)
    greatest_ptr += batch * tl.num_programs(0)
    i = tl.program_id(0)
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    doc = tl.load(doc_ptr + rows, mask=rows < N, other=0)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: a row may see nothing of its first tiles
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for j in range(i + 1):
        if meet(least_ptr, greatest_ptr, i, j):
            cols = j * BLOCK + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + head * D, cols, d, N, D)
            v = load_tile(v_ptr + head * D, cols, d, N, D)
            other = tl.load(doc_ptr + cols, mask=cols < N, other=0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            seen = (cols[None, :] <= rows[:, None]) & (other[None, :] == doc[:, None])
            s = tl.where(seen, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            m = m_new
    total = tl.where(rows < N, total, 1.0)
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def document_forward(q, k, v, doc):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or doc.shape != (B, N):
        raise ValueError("q, k and v must have one shape, and doc a number a token")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    T = triton.cdiv(N, tiles["BLOCK"])
    least, greatest = (torch.empty((B, T), device=q.device, dtype=doc.dtype) for _ in range(2))
    range_kernel[(T, B)](doc, least, greatest, N, BLOCK=tiles["BLOCK"])
    document_kernel[(T, B * H)](q, k, v, doc, least, greatest, o, lse, H, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse, least, greatest


@autodiff(inputs_require_grad=(0, 1, 2))
def document_attention(q, k, v, doc):
    """q, k, v: (batch, heads, tokens, dim); doc: int64 (batch, tokens), the document of each token."""
    return document_forward(q.contiguous(), k.contiguous(), v.contiguous(), doc.contiguous())[0]


def reference(q, k, v, doc):
    seen = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    s = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 2, "H": 16, "N": 4096, "docs": 9, "D": 64},
    {"B": 1, "H": 8, "N": 3001, "docs": 4, "D": 128},
]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 70, "docs": 4, "D": 16}, {"B": 2, "H": 1, "N": 37, "docs": 2, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    cuts = torch.randint(0, N + 1, (B, 1, max(1, dims["docs"]) - 1), device=device)
    doc = (cuts <= torch.arange(N, device=device)[:, None]).sum(-1)
    return q, k, v, doc


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, doc_ptr, least_ptr, greatest_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    batch = tl.program_id(1) // H
    doc_ptr += batch.to(tl.int64) * N
    least_ptr += batch * tl.num_programs(0)
    greatest_ptr += batch * tl.num_programs(0)
    i = tl.program_id(0)
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    doc = tl.load(doc_ptr + rows, mask=rows < N, other=0)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for j in range(i + 1):
        if meet(least_ptr, greatest_ptr, i, j):
            cols = j * BLOCK + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + head * D, cols, d, N, D)
            v = load_tile(v_ptr + head * D, cols, d, N, D)
            other = tl.load(doc_ptr + cols, mask=cols < N, other=0)
            seen = (cols[None, :] <= rows[:, None]) & (other[None, :] == doc[:, None])
            _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, doc_ptr, least_ptr, greatest_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    batch = tl.program_id(1) // H
    doc_ptr += batch.to(tl.int64) * N
    least_ptr += batch * tl.num_programs(0)
    greatest_ptr += batch * tl.num_programs(0)
    j = tl.program_id(0)
    cols, d = j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    doc = tl.load(doc_ptr + cols, mask=cols < N, other=0)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for i in range(j, tl.num_programs(0)):
        if meet(least_ptr, greatest_ptr, i, j):
            rows = i * BLOCK + tl.arange(0, BLOCK)
            q = load_tile(q_ptr + head * D, rows, d, N, D)
            do = load_tile(do_ptr + head * D, rows, d, N, D)
            other = tl.load(doc_ptr + rows, mask=rows < N, other=0)
            lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
            delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
            seen = (cols[None, :] <= rows[:, None]) & (doc[None, :] == other[:, None])
            p, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, doc):
        q, k, v, doc = q.contiguous(), k.contiguous(), v.contiguous(), doc.contiguous()
        o, lse, least, greatest = document_forward(q, k, v, doc)
        ctx.save_for_backward(q, k, v, doc, o, lse, least, greatest)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, doc, o, lse, least, greatest = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        grid = (least.shape[1], B * H)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, doc, least, greatest, do, lse, delta)
        sizes = (H, N, D, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](*seen, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](*seen, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None, None


def document_attention_autograd(q, k, v, doc):
    return DocumentAttention.apply(q, k, v, doc)
