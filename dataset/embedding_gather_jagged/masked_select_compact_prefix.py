"""Rows where a mask is set, packed together: padding removed before a block that works on tokens.

Forward    y_{s_i} = x_i for the rows i with mask_i,  s_i the number of set rows before i
Backward   dx_i = dy_{s_i} where mask_i, and 0 elsewhere

Forward schedule: a program owns a tile of rows and columns. Where its rows go depends on all masks before it;
a mask is one byte, so each program counts those itself, in long reads from cache, and a prefix sum in
registers does the rest: no pass of its own, no wait of one program for another. The slots are saved, -1 for a
row that was not taken.
Backward schedule: rows of x are more than those of y, and every one of them wants a gradient. Their owners
look up the saved slot and gather, or write the zero: each dx is stored once. Scattering from y instead would
need dx filled with zeros first, which is one more pass over it.

op: masked_select
schedule: index_or_seed_replay, gather_transpose
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 64, "BLOCK_D": 64}


@triton.jit
def pack_kernel(
    x_ptr, mask_ptr, y_ptr, slot_ptr, rows, D,
    CHUNK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    i = first + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    before = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, first, CHUNK):
        earlier = start + tl.arange(0, CHUNK)
        before += tl.load(mask_ptr + earlier, mask=earlier < first, other=0).to(tl.int32)
    taken = tl.load(mask_ptr + i, mask=i < rows, other=0).to(tl.int32)
    slot = tl.sum(before, axis=0) + tl.cumsum(taken, axis=0) - taken
    mask = (taken[:, None] != 0) & (d[None, :] < D)
    x = tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + slot[:, None].to(tl.int64) * D + d[None, :], x, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(slot_ptr + i, tl.where(taken != 0, slot, -1), mask=i < rows)


def pack_forward(x, mask, count):
    rows, D = x.shape
    if mask.shape != (rows,) or mask.dtype != torch.bool:
        raise ValueError(f"a mask {mask.dtype} {tuple(mask.shape)} is not for {rows} rows")
    y = torch.empty((count, D), device=x.device, dtype=x.dtype)
    slot = torch.empty(rows, device=x.device, dtype=torch.int32)
    grid = (triton.cdiv(rows, TILE["BLOCK_R"]), max(1, triton.cdiv(D, TILE["BLOCK_D"])))
    pack_kernel[grid](x, mask.view(torch.uint8), y, slot, rows, D, CHUNK=1024, **TILE)
    return y, slot


@autodiff(inputs_require_grad=(0,))
def pack_rows(x, mask, count):
    """x: (rows, D); mask: bool (rows); count: how many are set; gives (count, D)."""
    return pack_forward(x.contiguous(), mask.contiguous(), count)[0]


def reference(x, mask, count):
    return x[mask]


SWEEP = [{"rows": 65536, "D": 768}, {"rows": 30011, "D": 1000}]
SWEEP_CPU = [{"rows": 403, "D": 12}, {"rows": 90, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["rows"], dims["D"], device=device, dtype=dtype)
    mask = torch.rand(dims["rows"], device=device) < 0.6
    return x, mask, int(mask.sum())


# ---- backward ----


@triton.jit
def unpack_kernel(dy_ptr, slot_ptr, dx_ptr, rows, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tl.load(slot_ptr + i, mask=i < rows, other=-1).to(tl.int64)
    taken = (slot[:, None] >= 0) & (d[None, :] < D)
    dy = tl.load(dy_ptr + slot[:, None] * D + d[None, :], mask=taken, other=0.0)
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dy, mask=(i[:, None] < rows) & (d[None, :] < D))


class PackRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, count):
        y, slot = pack_forward(x.contiguous(), mask.contiguous(), count)
        ctx.save_for_backward(slot)
        return y

    @staticmethod
    def backward(ctx, dy):
        (slot,) = ctx.saved_tensors
        rows, D = slot.numel(), dy.shape[1]
        dx = torch.empty((rows, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(rows, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
        unpack_kernel[grid](dy.contiguous(), slot, dx, rows, D, **TILE)
        return dx, None, None


def pack_rows_autograd(x, mask, count):
    return PackRows.apply(x, mask, count)
