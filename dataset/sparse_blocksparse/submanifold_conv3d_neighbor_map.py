"""Convolution on the occupied voxels of a grid: an output for each of them, and for no other.

Forward    y_i = sum over the offsets o with a neighbour n_io of x_{n_io} W_o;   n_io = -1: no voxel there
Backward   dx_j = sum over the (i, o) with n_io = j of dy_i W_o^T,   dW_o = sum over i of x_{n_io}^T dy_i.
           The offsets are those of a cube, in order, so offset O - 1 - o is the opposite of o, and a voxel
           that sees j by o is seen from j by the opposite:  n_io = j if and only if n_{j, O-1-o} = i. Hence
           dx_j = sum over the o with a neighbour of dy_{n_jo} W_{O-1-o}^T

Forward schedule: a table of neighbours is made from the coordinates, by a sort and a search. A program owns
(tile of voxels, tile of output channels) and walks the offsets; each is a dot of rows gathered through a
column of the table.
Backward schedule: in general a gathered product has a scattered gradient. Here the table is its own inverse,
but for the order of its columns, so dx is the forward again, with dy for x and the weights mirrored and
transposed: no sort, no second table, no atomics. dW has few tiles, one an (offset, C x K tile), and many
voxels: these are split into parts, each part stores its own tile, and a second kernel adds the parts in
order.

op: submanifold_conv
schedule: segment_gather, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


def neighbour_table(coords, R):
    """int64 (V, R^3): the voxel at each offset from -(R // 2) to R // 2, or -1."""
    scale = torch.tensor([2**40, 2**20, 1], device=coords.device)
    span = torch.arange(R, device=coords.device) - R // 2
    code = (coords * scale).sum(-1)
    wanted = code[:, None] + (torch.cartesian_prod(span, span, span).view(-1, 3) * scale).sum(-1)
    code, order = code.sort()
    place = torch.searchsorted(code, wanted).clamp(max=code.numel() - 1)
    return order[place].masked_fill(code[place] != wanted, -1)


@triton.jit
def load_tile(ptr, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def neighbour_kernel(
    x_ptr, w_ptr, table_ptr, y_ptr, V, O, C, K, MIRRORED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (V, K) from x (V, C) by the weights w[o], (C, K), or if MIRRORED by w[O - 1 - o]^T."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for o in range(O):
        n = tl.load(table_ptr + i * O + o, mask=i < V, other=-1)
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            if MIRRORED:
                w = tl.trans(load_tile(w_ptr, (O - 1 - o) * K + k, c, k < K, C))
            else:
                w = load_tile(w_ptr, o * C + c, k, c < C, K)
            y = tl.dot(load_tile(x_ptr, n, c, n >= 0, C), w, y, input_precision=PRECISION)
    store_tile(y_ptr, y, i, k, i < V, K)


def convolve(x, w, table, width, mirrored):
    (V, C), tiles = x.shape, tiling(x)
    y = torch.empty((V, width), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(V, tiles["BLOCK"]), triton.cdiv(width, tiles["BLOCK"]))
    neighbour_kernel[grid](x, w, table, y, V, w.shape[0], C, width, MIRRORED=mirrored, **tiles)
    return y


def submanifold_conv_forward(x, w, coords):
    R = round(w.shape[0] ** (1 / 3))
    if w.shape[1] != x.shape[1] or coords.shape != (x.shape[0], 3) or w.shape[0] != R**3 or R % 2 == 0:
        raise ValueError(
            f"x {tuple(x.shape)}, w {tuple(w.shape)} and coords {tuple(coords.shape)} do not fit"
        )
    table = neighbour_table(coords, R)
    return convolve(x, w, table, w.shape[2], False), table


@autodiff(inputs_require_grad=(0, 1))
def submanifold_conv(x, w, coords):
    """x: (V, C); w: (R^3, C, K), R odd; coords: int64 (V, 3), all different, from 0 to a million."""
    return submanifold_conv_forward(x.contiguous(), w.contiguous(), coords)[0]


def reference(x, w, coords):
    table = neighbour_table(coords, round(w.shape[0] ** (1 / 3)))
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])])  # -1 is the row of zeros
    return sum(rows[table[:, o]] @ w[o] for o in range(w.shape[0]))


SWEEP = [{"V": 100000, "C": 64, "K": 64, "R": 3}, {"V": 40009, "C": 96, "K": 130, "R": 3}]
SWEEP_CPU = [{"V": 45, "C": 16, "K": 20, "R": 3}, {"V": 70, "C": 37, "K": 8, "R": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    V, C, K, R = (dims[key] for key in ("V", "C", "K", "R"))
    side = 1 + int((3 * V) ** (1 / 3))  # a third of a cube's cells is occupied
    cell = torch.randperm(side**3, device=device)[:V]
    coords = torch.stack([cell // side**2, cell // side % side, cell % side], dim=1)
    x = torch.randn(V, C, device=device, dtype=dtype)
    w = torch.randn(R**3, C, K, device=device, dtype=dtype) / max(1, R**3 * C) ** 0.5
    return x, w, coords


# ---- backward ----


@triton.jit
def weight_slot_kernel(
    x_ptr, dy_ptr, table_ptr, slots_ptr, V, O, C, K, part, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dW of an offset from one part of the voxels."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o, slot = tl.program_id(2) % O, (tl.program_id(2) // O).to(tl.int64)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, V), BLOCK):
        i = start + tl.arange(0, BLOCK)
        n = tl.load(table_ptr + i * O + o, mask=i < V, other=-1)
        x = tl.trans(load_tile(x_ptr, n, c, n >= 0, C))
        dw = tl.dot(x, load_tile(dy_ptr, i, k, i < V, K), dw, input_precision=PRECISION)
    store_tile(slots_ptr + (slot * O + o) * C * K, dw, c, k, c < C, K)


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    slot_ptrs = slots_ptr + i
    for _ in range(slots):
        dw += tl.load(slot_ptrs, mask=i < size, other=0.0)
        slot_ptrs += size
    tl.store(dw_ptr + i, dw.to(dw_ptr.dtype.element_ty), mask=i < size)


class SubmanifoldConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, coords):
        x, w = x.contiguous(), w.contiguous()
        y, table = submanifold_conv_forward(x, w, coords)
        ctx.save_for_backward(x, w, table)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, table = ctx.saved_tensors
        dy = dy.contiguous()
        V, (O, C, K), tiles = x.shape[0], w.shape, tiling(x)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, w, table, C, True)
        if ctx.needs_input_grad[1]:
            BLOCK = tiles["BLOCK"]
            grid = (triton.cdiv(C, BLOCK), triton.cdiv(K, BLOCK))
            wanted = triton.cdiv(1024, max(1, grid[0] * grid[1] * O))  # parts, to fill a GPU
            part = triton.cdiv(max(V, 1), wanted * BLOCK) * BLOCK
            count = triton.cdiv(V, part)
            slots = torch.empty((count, O, C, K), device=x.device, dtype=torch.float32)
            weight_slot_kernel[(*grid, O * count)](x, dy, table, slots, V, O, C, K, part, **tiles)
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(w.numel(), 256),)](slots, dw, count, w.numel(), BLOCK=256)
        return dx, dw, None


def submanifold_conv_autograd(x, w, coords):
    return SubmanifoldConv.apply(x, w, coords)
