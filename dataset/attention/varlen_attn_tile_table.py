"""Attention over a packed batch of sequences of different lengths.

Forward    per sequence and head:  P = softmax(s Q K^T),  O = P V
Backward   dV = P^T dO,  dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dQ = s dS K,  dK = s dS^T Q

Forward schedule: a table made from the offsets lists (sequence, first row) of every query tile; a program
owns an entry and a head, and its loop over the keys ends with its sequence. No tile mixes sequences, no
program is idle, nothing is padded.
Backward schedule: the same table serves both ownerships, as queries and keys are cut alike: an entry owns a
key tile for dK and dV and walks its sequence's queries, or owns a query tile for dQ and walks its keys. P
is rebuilt from the saved lse, the work is the sum of the squared lengths, and nothing is atomic.

op: varlen_attention
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
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    BLOCK = 64 if q.dtype != torch.float32 else 32 if BLOCK_D <= 64 else 16
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8}


def tile_table(offsets, BLOCK):
    """int64 (tiles, 2): the sequence and the first row of each tile."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    sequence = torch.repeat_interleave(torch.arange(tiles.numel(), device=offsets.device), tiles)
    tile = torch.arange(sequence.numel(), device=offsets.device) - (tiles.cumsum(0) - tiles)[sequence]
    return torch.stack([sequence, offsets[sequence] + tile * BLOCK], dim=1)


@triton.jit
def load_tile(ptr, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def varlen_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, offsets_ptr, table_ptr, H, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(table_ptr + 2 * tl.program_id(0))
    rows = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    end = tl.load(offsets_ptr + sequence + 1)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, end, H * D, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + sequence), end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, end, H * D, D)
        v = load_tile(v_ptr + head * D, cols, d, end, H * D, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < end, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, end, H * D, D)
    tl.store(lse_ptr + rows * H + head, m + tl.log2(total), mask=rows < end)


def varlen_attention_forward(q, k, v, offsets, table):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    T, H, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((T, H), device=q.device, dtype=torch.float32)
    grid = (table.shape[0], H)
    varlen_attention_kernel[grid](q, k, v, o, lse, offsets, table, H, D, D**-0.5 * LOG2E, **tiling(q))
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def varlen_attention(q, k, v, offsets):
    """q, k, v: (tokens, heads, dim); offsets: int64 (sequences + 1), from 0 to tokens, not decreasing."""
    table = tile_table(offsets, tiling(q)["BLOCK"])
    return varlen_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), offsets, table)[0]


def reference(q, k, v, offsets):
    outputs = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        qs, ks, vs = (tensor[begin:end].transpose(0, 1) for tensor in (q, k, v))
        p = torch.softmax(q.shape[-1] ** -0.5 * qs @ ks.transpose(1, 2), dim=-1)
        outputs.append((p @ vs).transpose(0, 1))
    return torch.cat(outputs)


SWEEP = [
    {"L0": 4096, "L1": 1, "L2": 2048, "L3": 2049, "H": 16, "D": 128},
    {"L0": 1024, "L1": 512, "L2": 4000, "L3": 2656, "H": 32, "D": 64},
    {"L0": 0, "L1": 1333, "L2": 77, "L3": 3001, "H": 12, "D": 96},
]
SWEEP_CPU = [
    {"L0": 5, "L1": 31, "L2": 1, "L3": 40, "H": 2, "D": 16},
    {"L0": 0, "L1": 33, "L2": 8, "L3": 2, "H": 1, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.tensor([dims[f"L{i}"] for i in range(4)], device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shape = (sum(dims[f"L{i}"] for i in range(4)), dims["H"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, offsets


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, n_rows, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (token, head) pairs
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, n_rows, D, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, n_rows, D, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < n_rows)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, end, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.where((rows[:, None] < end) & (cols[None, :] < end), tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, offsets_ptr, table_ptr, dk_ptr, dv_ptr,
    H, D, scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(table_ptr + 2 * tl.program_id(0))
    cols = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    end = tl.load(offsets_ptr + sequence + 1)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, end, H * D, D)
    v = load_tile(v_ptr + head * D, cols, d, end, H * D, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + sequence), end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, end, H * D, D)
        do = load_tile(do_ptr + head * D, rows, d, end, H * D, D)
        lse = tl.load(lse_ptr + rows * H + head, mask=rows < end, other=0.0)
        delta = tl.load(delta_ptr + rows * H + head, mask=rows < end, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, end, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, end, H * D, D)
    store_tile(dv_ptr + head * D, dv, cols, d, end, H * D, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, offsets_ptr, table_ptr, dq_ptr,
    H, D, scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(table_ptr + 2 * tl.program_id(0))
    rows = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    end = tl.load(offsets_ptr + sequence + 1)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, end, H * D, D)
    do = load_tile(do_ptr + head * D, rows, d, end, H * D, D)
    lse = tl.load(lse_ptr + rows * H + head, mask=rows < end, other=0.0)
    delta = tl.load(delta_ptr + rows * H + head, mask=rows < end, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + sequence), end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, end, H * D, D)
        v = load_tile(v_ptr + head * D, cols, d, end, H * D, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, end, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, end, H * D, D)


class VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        table = tile_table(offsets, tiling(q)["BLOCK"])
        o, lse = varlen_attention_forward(q, k, v, offsets, table)
        ctx.save_for_backward(q, k, v, o, lse, offsets, table)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, offsets, table = ctx.saved_tensors
        do = do.contiguous()
        _, H, D = q.shape
        scale = D**-0.5
        tiles = tiling(q)
        BLOCK, BLOCK_D = tiles["BLOCK"], tiles["BLOCK_D"]
        grid = (table.shape[0], H)
        delta = torch.empty_like(lse)
        n_rows = delta.numel()
        delta_kernel[(triton.cdiv(n_rows, BLOCK),)](o, do, delta, n_rows, D, BLOCK=BLOCK, BLOCK_D=BLOCK_D)
        saved = (q, k, v, do, lse, delta, offsets, table)
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            dq_kernel[grid](*saved, dq, H, D, scale, scale * LOG2E, **tiles)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[grid](*saved, dk, dv, H, D, scale, scale * LOG2E, **tiles)
        return dq, dk if ctx.needs_input_grad[1] else None, dv if ctx.needs_input_grad[2] else None, None


def varlen_attention_autograd(q, k, v, offsets):
    return VarlenAttention.apply(q, k, v, offsets)
