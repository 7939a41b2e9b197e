"""Two packed batches joined sequence by sequence: a prompt before its answer, user tokens before items.

Forward    sequence s of y is [rows of a's sequence s, rows of b's sequence s];  with p and q the offsets of a
           and b, it begins at p_s + q_s, so y has offsets p + q
Backward   da_i = dy_{i + q_s} for i in a's sequence s;   db_j = dy_{j + p_{s+1}} for j in b's

Forward schedule: a program owns a tile of y's rows and of columns; a row finds its sequence by bisection of p
+ q, made on the fly, and then whether it is from a or from b.
Backward schedule: every row of a and of b has one place in y, so both gradients are gathers; their owners are
the rows of a followed by those of b, in one launch, which keeps a short one from being a launch too small to
fill the machine. A tile of rows may hold the end of a and the start of b; each lane bisects the offsets of
its own tensor. Places in y are shifts by an offset of the other tensor, so nothing was saved of the forward
but p and q.

op: jagged_concat
schedule: gather_transpose
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 32, "BLOCK_D": 64}


@triton.jit
def join_kernel(
    a_ptr, b_ptr, p_ptr, q_ptr, y_ptr, rows, S, D,
    BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.zeros([BLOCK_R], dtype=tl.int64)
    for bit in tl.static_range(BITS):  # the last sequence of y that begins at i or before
        later = s + (1 << (BITS - 1 - bit))
        begin = tl.load(p_ptr + later, mask=later < S, other=0)
        begin += tl.load(q_ptr + later, mask=later < S, other=0)
        s = tl.where((later < S) & (begin <= i), later, s)
    from_a = i - tl.load(q_ptr + s, mask=i < rows, other=0)
    end_a = tl.load(p_ptr + s + 1, mask=i < rows, other=0)
    is_a = from_a < end_a
    mask = (i[:, None] < rows) & (d[None, :] < D)
    a = tl.load(a_ptr + from_a[:, None] * D + d[None, :], mask=mask & is_a[:, None], other=0.0)
    from_b = i - end_a
    b = tl.load(b_ptr + from_b[:, None] * D + d[None, :], mask=mask & (is_a[:, None] == 0), other=0.0)
    tl.store(y_ptr + i[:, None] * D + d[None, :], tl.where(is_a[:, None], a, b), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def jagged_concat(a, b, p, q):
    """a: (rows of a, D); b: (rows of b, D); p, q: int64 (S + 1), their offsets, from 0 to their rows."""
    (rows_a, D), rows_b, S = a.shape, b.shape[0], p.numel() - 1
    if q.numel() != S + 1 or b.shape[1] != D:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)}, or their sequences, do not match")
    y = torch.empty((rows_a + rows_b, D), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(rows_a + rows_b, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
    join_kernel[grid](
        a.contiguous(), b.contiguous(), p.contiguous(), q.contiguous(), y, rows_a + rows_b, S, D,
        BITS=(S - 1).bit_length(), **TILE,
    )  # fmt: skip
    return y


def reference(a, b, p, q):
    parts = [a.new_zeros(0, a.shape[1])]
    for from_a, from_b in zip(a.split(p.diff().tolist()), b.split(q.diff().tolist()), strict=True):
        parts += [from_a, from_b]
    return torch.cat(parts)


SWEEP = [{"S": 256, "La": 256, "Lb": 512, "D": 768}, {"S": 1001, "La": 7, "Lb": 61, "D": 500}]
SWEEP_CPU = [{"S": 3, "La": 9, "Lb": 6, "D": 25}, {"S": 7, "La": 3, "Lb": 20, "D": 66}]


def make_args(dims, device="cuda", dtype=torch.float32):
    tensors, offsets = [], []
    for length in (dims["La"], dims["Lb"]):
        lengths = torch.randint(0, length + 1, (dims["S"],), device=device)
        offsets.append(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        tensors.append(torch.randn(int(offsets[-1][-1]), dims["D"], device=device, dtype=dtype))
    return *tensors, *offsets


# ---- backward ----


@triton.jit
def sequence_of(offsets_ptr, i, S, BITS: tl.constexpr):
    s = i * 0
    for bit in tl.static_range(BITS):
        later = s + (1 << (BITS - 1 - bit))
        begin = tl.load(offsets_ptr + later, mask=later < S, other=0)
        s = tl.where((later < S) & (begin <= i), later, s)
    return s


@triton.jit
def part_kernel(
    dy_ptr, p_ptr, q_ptr, da_ptr, db_ptr, rows_a, rows_b, S, D,
    BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_a, is_b = i < rows_a, (i >= rows_a) & (i < rows_a + rows_b)
    j = i - rows_a
    shift_a = tl.load(q_ptr + sequence_of(p_ptr, i, S, BITS), mask=is_a, other=0)
    shift_b = tl.load(p_ptr + sequence_of(q_ptr, j, S, BITS) + 1, mask=is_b, other=0)
    place = tl.where(is_a, i + shift_a, j + shift_b)
    columns = d[None, :] < D
    mask = (is_a | is_b)[:, None] & columns
    dy = tl.load(dy_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(da_ptr + i[:, None] * D + d[None, :], dy, mask=is_a[:, None] & columns)
    tl.store(db_ptr + j[:, None] * D + d[None, :], dy, mask=is_b[:, None] & columns)


class JaggedConcat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, p, q):
        p, q = p.contiguous(), q.contiguous()
        ctx.save_for_backward(p, q)
        ctx.rows = a.shape[0], b.shape[0]
        return jagged_concat(a, b, p, q)

    @staticmethod
    def backward(ctx, dy):
        p, q = ctx.saved_tensors
        (rows_a, rows_b), D, S = ctx.rows, dy.shape[1], p.numel() - 1
        da, db = (torch.empty((rows, D), device=dy.device, dtype=dy.dtype) for rows in ctx.rows)
        grid = (triton.cdiv(rows_a + rows_b, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
        part_kernel[grid](
            dy.contiguous(), p, q, da, db, rows_a, rows_b, S, D, BITS=(S - 1).bit_length(), **TILE
        )
        needs = ctx.needs_input_grad
        return da if needs[0] else None, db if needs[1] else None, None, None


def jagged_concat_autograd(a, b, p, q):
    return JaggedConcat.apply(a, b, p, q)
