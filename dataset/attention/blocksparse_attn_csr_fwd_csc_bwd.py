"""Block-sparse attention: which blocks of 32 queries see which blocks of 32 keys is a table, one a head.

Forward    S_ij = <q_i, k_j> / sqrt(D) where layout[h, i // 32, j // 32],  P = softmax over those j,  O = P V;
           a query that sees no key gets 0
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dQ_i = sum over the j that i sees of dS_ij k_j,
           dK_j = sum over the i that see j of dS_ij q_i,  dV_j = sum over them of P_ij dO_i,
           dQ and dK over sqrt(D)

Forward schedule: the layout is turned into lists, row by row (CSR): where each query block's list begins, and
its key blocks. A program owns a query block and walks its list with an online softmax; absent blocks cost
nothing, not even a test.
Backward schedule: dQ walks the same lists. dK and dV sum along the columns of the layout, so their owner
needs the lists of the transposed layout (CSC): the same function of layout^T. A key block's owner walks the
query blocks that see it, rebuilds P from lse and stores once. With the CSR lists alone a query block would
have to add to dK and dV of all its keys by atomics, and a global block, which every query sees, would be the
place where all of them wait; here it is one program with a long list.

op: block_sparse_attention
schedule: swap_owner, segment_gather, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634
BLOCK = 32  # of the layout, and of all tiles


def block_lists(layout):
    """int64: where the list of each (head, block row) begins, and the lists' block columns."""
    begin = torch.nn.functional.pad(layout.sum(-1).flatten().cumsum(0), (1, 0))
    return begin, layout.nonzero()[:, 2].contiguous()


def tiling(q):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, block_ptr, o_ptr, lse_ptr, H, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    row = tl.program_id(1) % H * tl.num_programs(0) + tl.program_id(0)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for i in range(tl.load(begin_ptr + row), tl.load(begin_ptr + row + 1)):
        cols = tl.load(block_ptr + i) * BLOCK + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    seen = total > 0.0
    store_tile(o_ptr + head * D, acc / tl.where(seen, total, 1.0)[:, None], rows, d, N, D)
    lse = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), 0.0)
    tl.store(lse_ptr + head + rows, lse, mask=rows < N)


def sparse_attention_forward(q, k, v, layout):
    B, H, N, D = q.shape
    blocks = triton.cdiv(N, BLOCK)
    if not q.shape == k.shape == v.shape or layout.shape != (H, blocks, blocks):
        raise ValueError(f"q, k and v must have one shape, and layout be ({H}, {blocks}, {blocks})")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    begin, block = block_lists(layout)
    sparse_attention_kernel[(blocks, B * H)](
        q, k, v, begin, block, o, lse, H, N, D, D**-0.5 * LOG2E, **tiling(q)
    )
    return o, lse, begin, block


@autodiff(inputs_require_grad=(0, 1, 2))
def block_sparse_attention(q, k, v, layout):
    """q, k, v: (B, H, N, D); layout: bool (H, ceil(N / 32), ceil(N / 32)), queries by keys."""
    return sparse_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), layout)[0]


def reference(q, k, v, layout):
    N = q.shape[2]
    seen = layout.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)[:, :N, :N]
    s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
    return (torch.softmax(s, dim=-1) * seen) @ v


SWEEP = [{"B": 1, "H": 16, "N": 4096, "D": 64}, {"B": 1, "H": 8, "N": 4001, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 150, "D": 16}, {"B": 2, "H": 1, "N": 96, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    blocks = triton.cdiv(N, BLOCK)
    layout = torch.rand(H, blocks, blocks, device=device) < 0.3
    layout[:, :, 0] = torch.rand(H, blocks, device=device) < 0.8  # nearly all see the first block
    return q, k, v, layout


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=0))


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    inside = (rows[:, None] < N) & (cols[None, :] < N)
    p = tl.exp2(tl.where(inside, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def key_block_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, block_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D,
    scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """begin and block list the query blocks of each key block."""
    head = tl.program_id(1).to(tl.int64) * N
    column = tl.program_id(1) % H * tl.num_programs(0) + tl.program_id(0)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for i in range(tl.load(begin_ptr + column), tl.load(begin_ptr + column + 1)):
        rows = tl.load(block_ptr + i) * BLOCK + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def query_block_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, block_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, D,
    scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    row = tl.program_id(1) % H * tl.num_programs(0) + tl.program_id(0)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for i in range(tl.load(begin_ptr + row), tl.load(begin_ptr + row + 1)):
        cols = tl.load(block_ptr + i) * BLOCK + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class BlockSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse, begin, block = sparse_attention_forward(q, k, v, layout)
        ctx.save_for_backward(q, k, v, layout, o, lse, begin, block)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, layout, o, lse, begin, block = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        grid, needed = (layout.shape[1], B * H), ctx.needs_input_grad
        tiles, sizes = tiling(q), (H, N, D, D**-0.5, D**-0.5 * LOG2E)
        delta = torch.empty_like(lse)
        delta_kernel[(B * H * N,)](o, do, delta, D, BLOCK_D=tiles["BLOCK_D"])
        dq = dk = dv = None
        if needed[0]:
            dq = torch.empty_like(q)
            query_block_kernel[grid](q, k, v, begin, block, do, lse, delta, dq, *sizes, **tiles)
        if needed[1] or needed[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            lists = block_lists(layout.transpose(1, 2))
            key_block_kernel[grid](q, k, v, *lists, do, lse, delta, dk, dv, *sizes, **tiles)
        return dq, dk if needed[1] else None, dv if needed[2] else None, None


def block_sparse_attention_autograd(q, k, v, layout):
    return BlockSparseAttention.apply(q, k, v, layout)
