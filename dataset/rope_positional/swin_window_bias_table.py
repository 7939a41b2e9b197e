"""Scaled scores of square windows plus a learned bias by relative place: window attention, as in Swin.

Forward    y[b, h, i, j] = scale s[b, h, i, j] + table[o(i, j), h];  tokens i, j of a window of m x m, and
           o(i, j) = (i_y - j_y + m - 1) (2m - 1) + (i_x - j_x + m - 1), one of (2m - 1)^2 offsets
Backward   ds = scale dy;  dtable[o, h] = sum over windows b and the pairs with o(i, j) = o of dy[b, h, i, j]

Forward schedule: a program owns (window, flat tile of its heads' scores) and gathers the bias, whose table
stays in cache.
Backward schedule: the table's sum runs over windows, thousands of them at one stride, and over pairs, some
m^2 of them that lie on scattered diagonals. An owner of (offset, head) walking both would read single
numbers all over dy. So the sums come one after the other: a program owns (slot, flat tile of the heads'
scores) and walks the windows slot, slot + G, ..., which reads dy in whole lines, stores ds on the way and
ends with one sum a score. Only those G planes, which fit in cache, are then gathered along diagonals: a
program owns (offset, head) and has a lane for each i, whose j follows from the offset.

op: window_bias
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def window_bias_kernel(s_ptr, table_ptr, y_ptr, H, m, scale, BLOCK: tl.constexpr):
    n = m * m
    b = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < H * n * n
    h, i, j = at // (n * n), at // n % n, at % n
    offset = (i // m - j // m + m - 1) * (2 * m - 1) + i % m - j % m + m - 1
    bias = tl.load(table_ptr + offset * H + h, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + b * H * n * n + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + b * H * n * n + at, (scale * s + bias).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def window_bias(s, table, m, scale):
    """s: (windows, H, m m, m m); table: ((2m - 1)^2, H)."""
    windows, H, n, _ = s.shape
    if n != m * m or n > 4096 or table.shape != ((2 * m - 1) ** 2, H):
        raise ValueError(f"scores {tuple(s.shape)}, table {tuple(table.shape)} and side {m} do not fit")
    y = torch.empty(s.shape, device=s.device, dtype=s.dtype)
    grid = (windows, triton.cdiv(H * n * n, 512))
    window_bias_kernel[grid](s.contiguous(), table.contiguous(), y, H, m, scale, BLOCK=512)
    return y


def reference(s, table, m, scale):
    y, x = torch.meshgrid(*(2 * [torch.arange(m, device=s.device)]), indexing="ij")
    y, x = y.flatten(), x.flatten()
    offset = (y[:, None] - y + m - 1) * (2 * m - 1) + x[:, None] - x + m - 1
    return scale * s + table[offset].permute(2, 0, 1)


SWEEP = [{"W": 4096, "H": 3, "m": 7}, {"W": 257, "H": 24, "m": 12}]
SWEEP_CPU = [{"W": 6, "H": 2, "m": 4}, {"W": 35, "H": 1, "m": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    W, H, m = dims["W"], dims["H"], dims["m"]
    s = torch.randn(W, H, m * m, m * m, device=device, dtype=dtype)
    return s, torch.randn((2 * m - 1) ** 2, H, device=device, dtype=dtype), m, 0.125


# ---- backward ----

MAX_SLOTS = 32


@triton.jit
def scores_and_sums_kernel(dy_ptr, ds_ptr, part_ptr, windows, G, PLANE, scale, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < PLANE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(slot, windows, G):
        dy = tl.load(dy_ptr + b * PLANE + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(ds_ptr + b * PLANE + at, (scale * dy).to(ds_ptr.dtype.element_ty), mask=mask)
        total += dy
    tl.store(part_ptr + slot * PLANE + at, total, mask=mask)


@triton.jit
def table_kernel(part_ptr, dtable_ptr, G, H, m, BLOCK: tl.constexpr):
    offset = tl.program_id(0)
    h = tl.program_id(1)
    n = m * m
    i = tl.arange(0, BLOCK)
    j_y = i // m - (offset // (2 * m - 1) - m + 1)
    j_x = i % m - (offset % (2 * m - 1) - m + 1)
    mask = (i < n) & (j_y >= 0) & (j_y < m) & (j_x >= 0) & (j_x < m)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(G):
        at = ((slot * H + h) * n + i) * n + j_y * m + j_x
        total += tl.load(part_ptr + at, mask=mask, other=0.0)
    tl.store(dtable_ptr + offset * H + h, tl.sum(total, axis=0).to(dtable_ptr.dtype.element_ty))


class WindowBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, table, m, scale):
        ctx.options, ctx.table_dtype = (m, scale), table.dtype
        return window_bias(s, table, m, scale)

    @staticmethod
    def backward(ctx, dy):
        dy, (m, scale), needs = dy.contiguous(), ctx.options, ctx.needs_input_grad
        windows, H, n, _ = dy.shape
        G, PLANE = min(windows, MAX_SLOTS), H * n * n
        ds, dtable = torch.empty_like(dy), None
        part = torch.empty((G, PLANE), device=dy.device, dtype=torch.float32)
        grid = (G, triton.cdiv(PLANE, 512))
        scores_and_sums_kernel[grid](dy, ds, part, windows, G, PLANE, scale, BLOCK=512)
        if needs[1]:
            offsets = (2 * m - 1) ** 2
            dtable = torch.empty((offsets, H), device=dy.device, dtype=ctx.table_dtype)
            table_kernel[(offsets, H)](part, dtable, G, H, m, BLOCK=triton.next_power_of_2(n))
        return ds if needs[0] else None, dtable, None, None


def window_bias_autograd(s, table, m, scale):
    return WindowBias.apply(s, table, m, scale)
