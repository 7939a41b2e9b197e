"""Attention of a sequential recommender (HSTU): silu in the place of softmax, over jagged sequences.

Forward    per sequence and head:  Z = s Q K^T,  A_ij = silu(Z_ij) / L for j <= i,  O = A V;  L the longest
           length that is allowed for, one number for all
Backward   silu'(z) = g + z g (1 - g) with g = sigmoid(z):   dV = A^T dO,
           dZ_ij = silu'(Z_ij) <dO_i, V_j> / L for j <= i,  dQ = s dZ K,  dK = s dZ^T Q

Forward schedule: tiles never mix sequences. The number of tiles is in the lengths, on the device; the grid is
made for T / BLOCK + (sequences), which is enough for any lengths, so nobody waits to read it, and the few
programs beyond the last tile return. A program owns a query tile and a head and walks the keys from its
sequence's first to the diagonal.
Backward schedule: without softmax no row statistic exists: nothing is saved but the inputs, no delta goes
before, and a tile of dZ follows from four tiles alone. So one launch does all: a program owns its tile as
keys, walking the later queries of the sequence for dK and dV, and then the same tile as queries, walking the
earlier keys for dQ. The two walks together cross the sequence once, whichever tile it is: work is even within
a sequence, stores are made once, and there are no atomics.

op: hstu_attention
schedule: swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


def tile_table(offsets, tokens, BLOCK):
    """int64 (tiles, 2): sequence and first row of each tile; the sequence is -1 beyond the last one."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    entry = torch.arange(tokens // BLOCK + tiles.numel(), device=offsets.device)
    sequence = torch.searchsorted(tiles.cumsum(0), entry, right=True)
    known = sequence.clamp(max=tiles.numel() - 1)
    first = offsets[known] + (entry - (tiles.cumsum(0) - tiles)[known]) * BLOCK
    return torch.stack([torch.where(sequence < tiles.numel(), sequence, -1), first], dim=1)


@triton.jit
def load_tile(ptr, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, end, stride, D):
    mask = (rows[:, None] < end) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def hstu_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, offsets_ptr, table_ptr, H, D, scale, longest,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(table_ptr + 2 * tl.program_id(0))
    if sequence >= 0:
        first = tl.load(table_ptr + 2 * tl.program_id(0) + 1)
        end = tl.load(offsets_ptr + sequence + 1)
        column = tl.program_id(1) * D
        rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        q = load_tile(q_ptr + column, rows, d, end, H * D, D)
        acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        for start in range(tl.load(offsets_ptr + sequence), first + 1, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            k = load_tile(k_ptr + column, cols, d, end, H * D, D)
            v = load_tile(v_ptr + column, cols, d, end, H * D, D)
            z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            a = tl.where(cols[None, :] <= rows[:, None], z * tl.sigmoid(z), 0.0)
            acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)
        store_tile(o_ptr + column, acc / longest, rows, d, end, H * D, D)


@autodiff(inputs_require_grad=(0, 1, 2))
def hstu_attention(q, k, v, offsets, longest):
    """q, k, v: (tokens, heads, dim); offsets: int64 (sequences + 1), from 0 to tokens, not decreasing."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    q, k, v, (T, H, D) = q.contiguous(), k.contiguous(), v.contiguous(), q.shape
    if D > 128 or longest <= 0:
        raise ValueError(f"a head of {D} does not fit one tile, or {longest} is no length")
    o, tiles = torch.empty_like(q), tiling(q)
    table = tile_table(offsets, T, tiles["BLOCK"])
    hstu_kernel[(table.shape[0], H)](q, k, v, o, offsets, table, H, D, D**-0.5, longest, **tiles)
    return o


def reference(q, k, v, offsets, longest):
    outputs = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        qs, ks, vs = (tensor[begin:end].transpose(0, 1) for tensor in (q, k, v))
        z = q.shape[-1] ** -0.5 * qs @ ks.transpose(1, 2)
        outputs.append((torch.nn.functional.silu(z).tril() / longest @ vs).transpose(0, 1))
    return torch.cat(outputs)


SWEEP = [
    {"L0": 2048, "L1": 811, "L2": 1777, "L3": 96, "H": 8, "D": 64},
    {"L0": 1000, "L1": 0, "L2": 333, "L3": 1501, "H": 4, "D": 128},
]
SWEEP_CPU = [
    {"L0": 7, "L1": 33, "L2": 0, "L3": 18, "H": 2, "D": 16},
    {"L0": 0, "L1": 65, "L2": 1, "L3": 2, "H": 1, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.tensor([dims[f"L{i}"] for i in range(4)], device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shape = (sum(dims[f"L{i}"] for i in range(4)), dims["H"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return (q, k, v, offsets), {"longest": float(max(dims[f"L{i}"] for i in range(4)))}


# ---- backward ----


@triton.jit
def rebuild_a_dz(q, k, v, do, rows, cols, end, scale, PRECISION: tl.constexpr):
    """A and dZ of one tile, both times L, rows of queries by columns of keys."""
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    g = tl.sigmoid(z)
    seen = (cols[None, :] <= rows[:, None]) & (rows[:, None] < end)
    return tl.where(seen, z * g, 0.0), tl.where(seen, da * (g + z * g * (1 - g)), 0.0)


@triton.jit
def hstu_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, table_ptr, H, D, scale, longest,
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(table_ptr + 2 * tl.program_id(0))
    if sequence >= 0:
        first = tl.load(table_ptr + 2 * tl.program_id(0) + 1)
        begin, end = tl.load(offsets_ptr + sequence), tl.load(offsets_ptr + sequence + 1)
        column = tl.program_id(1) * D
        own, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        if KEYS:
            k = load_tile(k_ptr + column, own, d, end, H * D, D)
            v = load_tile(v_ptr + column, own, d, end, H * D, D)
            dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
            dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
            for start in range(first, end, BLOCK):
                rows = start + tl.arange(0, BLOCK)
                q = load_tile(q_ptr + column, rows, d, end, H * D, D)
                do = load_tile(do_ptr + column, rows, d, end, H * D, D)
                a, dz = rebuild_a_dz(q, k, v, do, rows, own, end, scale, PRECISION)
                dv = tl.dot(tl.trans(a.to(do.dtype)), do, dv, input_precision=PRECISION)
                dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
            store_tile(dk_ptr + column, dk * (scale / longest), own, d, end, H * D, D)
            store_tile(dv_ptr + column, dv / longest, own, d, end, H * D, D)
        if QUERIES:
            own_q = load_tile(q_ptr + column, own, d, end, H * D, D)
            own_do = load_tile(do_ptr + column, own, d, end, H * D, D)
            dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
            for start in range(begin, first + 1, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                walked_k = load_tile(k_ptr + column, cols, d, end, H * D, D)
                walked_v = load_tile(v_ptr + column, cols, d, end, H * D, D)
                _, dz = rebuild_a_dz(own_q, walked_k, walked_v, own_do, own, cols, end, scale, PRECISION)
                dq = tl.dot(dz.to(walked_k.dtype), walked_k, dq, input_precision=PRECISION)
            store_tile(dq_ptr + column, dq * (scale / longest), own, d, end, H * D, D)


class HSTUAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, longest):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v, offsets)
        ctx.longest = longest
        return hstu_attention(q, k, v, offsets, longest)

    @staticmethod
    def backward(ctx, do):
        q, k, v, offsets = ctx.saved_tensors
        (T, H, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        table = tile_table(offsets, T, tiles["BLOCK"])
        hstu_backward_kernel[(table.shape[0], H)](
            q, k, v, do.contiguous(), dq, dk, dv, offsets, table, H, D, D**-0.5, ctx.longest,
            KEYS=needs[1] or needs[2], QUERIES=needs[0], **tiles,
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip((dq, dk, dv), needs, strict=False)), None, None


def hstu_attention_autograd(q, k, v, offsets, longest):
    return HSTUAttention.apply(q, k, v, offsets, longest)
