"""Low-rank adapters of many tasks in one batch: each run of rows has an adapter of its own.

Forward    H_i = x_i A_s,   Y_i = scale H_i B_s   for the rows i of adapter s;  A_s is (D, r), B_s is (r, F)
Backward   U_i = scale dy_i B_s^T,   dx_i = U_i A_s^T,
           dA_s = sum over the rows of s of x_i^T U_i,   dB_s = scale sum of H_i^T dy_i

Forward schedule: a table from the offsets lists (adapter, first row) of every row tile. A program owns a
table entry: it walks D for its tile of H, which stays in registers as the left operand while it walks F. With
a rank of 16 to 128 there is no third loop. H, of r columns, is stored for the backward.
Backward schedule: dx is the forward with dy for x and the weights swapped and transposed, so the same kernel
makes it, and leaves U as the forward left H. The weights' sums run over rows, so (adapter, tile of D or F)
owners walk the rows of their adapter, by one kernel too, since dA_s = x^T U and dB_s^T = scale dy^T H are
both wide^T thin. Each is stored once, zeros for an adapter without rows; no atomics, although a batch has few
rows of many adapters.

op: multi_lora
schedule: swap_owner, segment_gather
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x, rank):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_R = max(16, triton.next_power_of_2(rank))
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64, "BLOCK_R": BLOCK_R}


def tile_table(offsets, BLOCK):
    """int64 (tiles, 2): the adapter and the first row of each row tile."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    adapter = torch.repeat_interleave(torch.arange(tiles.numel(), device=offsets.device), tiles)
    tile = torch.arange(adapter.numel(), device=offsets.device) - (tiles.cumsum(0) - tiles)[adapter]
    return torch.stack([adapter, offsets[adapter] + tile * BLOCK], dim=1)


@triton.jit
def load_tile(ptr, rows, cols, row_mask, col_mask, stride_r, stride_c):
    mask = row_mask[:, None] & col_mask[None, :]
    return tl.load(ptr + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, row_mask, col_mask, stride_r, stride_c):
    mask = row_mask[:, None] & col_mask[None, :]
    offs = rows[:, None] * stride_r + cols[None, :] * stride_c
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def thin_kernel(
    x_ptr, a_ptr, b_ptr, offsets_ptr, table_ptr, h_ptr, y_ptr, D, R, F, scale_h, scale_y,
    stride_as, stride_ad, stride_ar, stride_bs, stride_br, stride_bf,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """H = scale_h x A and Y = scale_y H B for one row tile."""
    adapter = tl.load(table_ptr + 2 * tl.program_id(0))
    i = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    inside = i < tl.load(offsets_ptr + adapter + 1)
    r = tl.arange(0, BLOCK_R)
    h = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, i, d, inside, d < D, D, 1)
        a = load_tile(a_ptr + adapter * stride_as, d, r, d < D, r < R, stride_ad, stride_ar)
        h = tl.dot(x, a, h, input_precision=PRECISION)
    h = (h * scale_h).to(h_ptr.dtype.element_ty)
    store_tile(h_ptr, h, i, r, inside, r < R, R, 1)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        b = load_tile(b_ptr + adapter * stride_bs, r, f, r < R, f < F, stride_br, stride_bf)
        y = tl.dot(h, b, input_precision=PRECISION) * scale_y
        store_tile(y_ptr, y, i, f, inside, f < F, F, 1)


def launch_thin(x, a, b, offsets, scale_h, scale_y):
    """H and Y; a and b may be transposed views."""
    D, R, F = a.shape[1], a.shape[2], b.shape[2]
    h, y = (torch.empty((x.shape[0], size), device=x.device, dtype=x.dtype) for size in (R, F))
    tiles = tiling(x, R)
    table = tile_table(offsets, tiles["BLOCK"])
    thin_kernel[(table.shape[0],)](
        x, a, b, offsets, table, h, y, D, R, F, scale_h, scale_y, *a.stride(), *b.stride(), **tiles
    )
    return h, y


def multi_lora_forward(x, a, b, offsets, scale):
    (S, D, R), F = a.shape, b.shape[2]
    if x.shape[1] != D or b.shape != (S, R, F) or offsets.shape != (S + 1,):
        raise ValueError(f"x {tuple(x.shape)}, a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    if R > 128:
        raise ValueError(f"a rank of {R} does not fit one tile")
    return launch_thin(x, a, b, offsets, 1.0, scale)


@autodiff(inputs_require_grad=(0, 1, 2))
def multi_lora(x, a, b, offsets, scale):
    """x: (T, D), sorted by adapter; a: (S, D, r); b: (S, r, F); offsets: int64 (S + 1), from 0 to T."""
    return multi_lora_forward(x.contiguous(), a, b, offsets, scale)[1]


def reference(x, a, b, offsets, scale):
    parts = x.split(offsets.diff().tolist())
    return torch.cat([scale * (part @ a[s]) @ b[s] for s, part in enumerate(parts)])


SWEEP = [
    {"T": 8192, "S": 16, "D": 4096, "R": 16, "F": 4096},
    {"T": 2039, "S": 50, "D": 2048, "R": 24, "F": 5504},
]
SWEEP_CPU = [
    {"T": 34, "S": 3, "D": 48, "R": 16, "F": 40},
    {"T": 75, "S": 4, "D": 37, "R": 5, "F": 21},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, S, D, R, F = (dims[name] for name in ("T", "S", "D", "R", "F"))
    x = torch.randn(T, D, device=device, dtype=dtype)
    a = torch.randn(S, D, R, device=device, dtype=dtype) / max(1, D) ** 0.5
    b = torch.randn(S, R, F, device=device, dtype=dtype)
    adapter = torch.rand(T, device=device).square().mul(S).long().clamp(max=S - 1)  # the first are popular
    offsets = torch.searchsorted(adapter.sort().values, torch.arange(S + 1, device=device))
    return x, a, b, offsets, 0.5


# ---- backward ----


@triton.jit
def weight_kernel(
    wide_ptr, thin_ptr, offsets_ptr, dw_ptr, D, R, scale, stride_s, stride_d, stride_r,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dw_s = scale wide^T thin over the rows of s: a tile of D by all of r."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    adapter = tl.program_id(1).to(tl.int64)
    end = tl.load(offsets_ptr + adapter + 1)
    r = tl.arange(0, BLOCK_R)
    dw = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + adapter), end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        wide = tl.trans(load_tile(wide_ptr, i, d, i < end, d < D, D, 1))
        dw = tl.dot(wide, load_tile(thin_ptr, i, r, i < end, r < R, R, 1), dw, input_precision=PRECISION)
    store_tile(dw_ptr + adapter * stride_s, dw * scale, d, r, d < D, r < R, stride_d, stride_r)


def launch_weight(wide, thin, offsets, dw, scale):
    """Fills dw (S, D, r), which may be a transposed view."""
    (S, D, R), tiles = dw.shape, tiling(wide, dw.shape[2])
    grid = (triton.cdiv(D, tiles["BLOCK"]), S)
    weight_kernel[grid](wide, thin, offsets, dw, D, R, scale, *dw.stride(), **tiles)


class MultiLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, offsets, scale):
        x = x.contiguous()
        h, y = multi_lora_forward(x, a, b, offsets, scale)
        ctx.save_for_backward(x, a, b, offsets, h)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        x, a, b, offsets, h = ctx.saved_tensors
        dy, needed = dy.contiguous(), ctx.needs_input_grad
        dx = da = db = None
        if needed[0] or needed[1]:
            u, dx = launch_thin(dy, b.transpose(1, 2), a.transpose(1, 2), offsets, ctx.scale, 1.0)
        if needed[1]:
            da = torch.empty(a.shape, device=a.device, dtype=a.dtype)
            launch_weight(x, u, offsets, da, 1.0)
        if needed[2]:
            db = torch.empty(b.shape, device=b.device, dtype=b.dtype)
            launch_weight(dy, h, offsets, db.transpose(1, 2), ctx.scale)
        return dx if needed[0] else None, da, db, None, None


def multi_lora_autograd(x, a, b, offsets, scale):
    return MultiLora.apply(x, a, b, offsets, scale)
