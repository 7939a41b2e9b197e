"""The whole expert MLP of a mixture: gather, two up products with SwiGLU, down product, weighted combine.

Forward    choice c of token t has expert e and weight g:  a = x_t W1_e,  b = x_t W3_e,  h = silu(a) * b,
           z = h W2_e,   y_t = sum_c g_tc z_tc
Backward   u = dy_t W2_e^T (the gradient of h for a weight of 1),   dg_tc = <dy_t, z> = <u, h>,   dh = g u,
           da = dh * b * silu'(a),   db = dh * silu(a),   silu'(a) = sigmoid(a) (1 + a (1 - sigmoid(a))),
           dW1_e = sum x_t^T da,   dW3_e = sum x_t^T db,   dW2_e = sum (g h)^T dy_t   over the choices of e,
           dx_t = sum_c (da W1_e^T + db W3_e^T)

Forward schedule: choices stand sorted by expert (order, offsets), and a table lists (expert, first row) of
every row tile. A program owns a table entry and a column tile. The up kernel gathers rows of x by token on
load and runs both products in one loop; the down kernel stores each z at its choice's place, where the
token's owner finds its C rows next to each other and combines them.
Backward schedule: nothing but the inputs is saved: of T C rows, a, b, h and z would be four tensors. One
kernel with the forward's tiles rebuilds a and b, and makes u in the same loop, as all three products run over
the channels of x and dy; its epilogue has all that SwiGLU needs. dg from <u, h> costs a row sum a tile there,
where <dy, z> would cost a second down product; the tiles' sums go to slots. h, da and db live from there to
the weight owners, (expert, tile) programs that walk the expert's rows and store once, dW1 and dW3 together
since they share x. dx is one grouped product with two operands, stored by choice and added by the token's
owner. No atomics.

op: moe_mlp
schedule: recompute_from_stats, swap_owner, segment_gather, partials_then_reduce
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


def tile_table(offsets, BLOCK):
    """int64 (tiles, 2): the expert and the first row of each row tile."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    expert = torch.repeat_interleave(torch.arange(tiles.numel(), device=offsets.device), tiles)
    tile = torch.arange(expert.numel(), device=offsets.device) - (tiles.cumsum(0) - tiles)[expert]
    return torch.stack([expert, offsets[expert] + tile * BLOCK], dim=1)


@triton.jit
def load_tile(ptr, rows, cols, row_mask, C):
    """Rows of a matrix with C columns; masked lanes are 0."""
    mask = row_mask[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, row_mask, C):
    mask = row_mask[:, None] & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def own_rows(order_ptr, offsets_ptr, table_ptr, BLOCK: tl.constexpr):
    """Expert, sorted rows, which of them exist, and their choices, for this program's table entry."""
    expert = tl.load(table_ptr + 2 * tl.program_id(0))
    i = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    inside = i < tl.load(offsets_ptr + expert + 1)
    return expert, i, inside, tl.load(order_ptr + i, mask=inside, other=0)


@triton.jit
def up_kernel(
    x_ptr, w1_ptr, w3_ptr, order_ptr, offsets_ptr, table_ptr, h_ptr, D, F, C,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, i, inside, choice = own_rows(order_ptr, offsets_ptr, table_ptr, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    b = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, choice // C, d, inside, D)
        w1 = load_tile(w1_ptr + expert * D * F, d, f, d < D, F)
        w3 = load_tile(w3_ptr + expert * D * F, d, f, d < D, F)
        a = tl.dot(x, w1, a, input_precision=PRECISION)
        b = tl.dot(x, w3, b, input_precision=PRECISION)
    store_tile(h_ptr, a * tl.sigmoid(a) * b, i, f, inside, F)


@triton.jit
def down_kernel(
    h_ptr, w2_ptr, order_ptr, offsets_ptr, table_ptr, z_ptr, D, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, i, inside, choice = own_rows(order_ptr, offsets_ptr, table_ptr, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        w2 = load_tile(w2_ptr + expert * F * D, f, d, f < F, D)
        z = tl.dot(load_tile(h_ptr, i, f, inside, F), w2, z, input_precision=PRECISION)
    store_tile(z_ptr, z, choice, d, inside, D)


@triton.jit
def combine_kernel(rows_ptr, g_ptr, y_ptr, D, C, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """y_t = sum_c rows_tc, each times g_tc if WEIGHTED."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        row = tl.load(rows_ptr + (token * C + c) * D + d, mask=d < D, other=0.0)
        if WEIGHTED:
            row *= tl.load(g_ptr + token * C + c).to(tl.float32)
        y += row
    tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def combine(rows, g, x, weighted):
    (T, D), C = x.shape, g.shape[1]
    y = torch.empty_like(x)
    combine_kernel[(T, triton.cdiv(D, 256))](rows, g, y, D, C, WEIGHTED=weighted, BLOCK=256)
    return y


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def moe_mlp(x, w1, w3, w2, g, order, offsets):
    """x: (T, D); w1, w3: (experts, D, F); w2: (experts, F, D); g: (T, C), the weight of each choice.

    order: int64 (T C), the choices t C + c sorted by expert; offsets: int64 (experts + 1), where each begins.
    """
    (T, D), (E, _, F), C = x.shape, w1.shape, g.shape[1]
    if w1.shape != (E, D, F) or w3.shape != (E, D, F) or w2.shape != (E, F, D):
        raise ValueError(f"w1, w3 and w2 do not fit x with {D} channels")
    if g.shape[0] != T or order.shape != (T * C,) or offsets.shape != (E + 1,):
        raise ValueError("g must be (T, C), order (T C) and offsets (experts + 1)")
    x, w1, w3, w2, g = (tensor.contiguous() for tensor in (x, w1, w3, w2, g))
    tiles, order = tiling(x), order.contiguous()
    rows = (order, offsets, tile_table(offsets, tiles["BLOCK"]))
    grid = [(rows[2].shape[0], triton.cdiv(size, tiles["BLOCK"])) for size in (F, D)]
    h = torch.empty((T * C, F), device=x.device, dtype=x.dtype)
    z = torch.empty((T * C, D), device=x.device, dtype=torch.float32)
    up_kernel[grid[0]](x, w1, w3, *rows, h, D, F, C, **tiles)
    down_kernel[grid[1]](h, w2, *rows, z, D, F, **tiles)
    return combine(z, g, x, True)


def reference(x, w1, w3, w2, g, order, offsets):
    C = g.shape[1]
    rows = []
    for e, part in enumerate(order.split(offsets.diff().tolist())):
        mine = x[part // C]
        rows.append((torch.nn.functional.silu(mine @ w1[e]) * (mine @ w3[e])) @ w2[e])
    z = torch.cat(rows)[order.argsort()].view(x.shape[0], C, -1)
    return (g[:, :, None] * z).sum(dim=1)


SWEEP = [
    {"T": 2048, "C": 2, "E": 8, "D": 2048, "F": 1408},
    {"T": 1021, "C": 8, "E": 24, "D": 2048, "F": 768},
]
SWEEP_CPU = [
    {"T": 21, "C": 2, "E": 3, "D": 32, "F": 24},
    {"T": 38, "C": 3, "E": 2, "D": 37, "F": 40},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, C, E, D, F = (dims[name] for name in ("T", "C", "E", "D", "F"))
    x = torch.randn(T, D, device=device, dtype=dtype)
    w1, w3 = (torch.randn(E, D, F, device=device, dtype=dtype) / max(1, D) ** 0.5 for _ in range(2))
    w2 = torch.randn(E, F, D, device=device, dtype=dtype) / max(1, F) ** 0.5
    g = torch.softmax(torch.randn(T, C, device=device, dtype=dtype), dim=1)
    expert = torch.rand(T * C, device=device).square().mul(E).long().clamp(max=E - 1)  # the first are popular
    offsets = torch.searchsorted(expert.sort().values, torch.arange(E + 1, device=device))
    return x, w1, w3, w2, g, expert.argsort(), offsets


# ---- backward ----


@triton.jit
def rebuild_kernel(
    x_ptr, w1_ptr, w3_ptr, w2_ptr, g_ptr, dy_ptr, order_ptr, offsets_ptr, table_ptr,
    gh_ptr, da_ptr, db_ptr, slots_ptr, D, F, C, P, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g h, da and db of a tile, and its share of dg."""
    expert, i, inside, choice = own_rows(order_ptr, offsets_ptr, table_ptr, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    b = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    u = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, choice // C, d, inside, D)
        dy = load_tile(dy_ptr, choice // C, d, inside, D)
        w1 = load_tile(w1_ptr + expert * D * F, d, f, d < D, F)
        w3 = load_tile(w3_ptr + expert * D * F, d, f, d < D, F)
        w2 = load_tile(w2_ptr + expert * F * D, f, d, f < F, D)
        a = tl.dot(x, w1, a, input_precision=PRECISION)
        b = tl.dot(x, w3, b, input_precision=PRECISION)
        u = tl.dot(dy, tl.trans(w2), u, input_precision=PRECISION)
    sigmoid = tl.sigmoid(a)
    h = a * sigmoid * b
    tl.store(slots_ptr + tl.program_id(1).to(tl.int64) * P + choice, tl.sum(u * h, axis=1), mask=inside)
    g = tl.load(g_ptr + choice, mask=inside, other=0.0).to(tl.float32)[:, None]
    store_tile(gh_ptr, g * h, i, f, inside, F)
    store_tile(da_ptr, g * u * b * sigmoid * (1.0 + a * (1.0 - sigmoid)), i, f, inside, F)
    store_tile(db_ptr, g * u * a * sigmoid, i, f, inside, F)


@triton.jit
def gate_kernel(slots_ptr, dg_ptr, slots, P, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    slot_ptrs = slots_ptr + choice
    for _ in range(slots):
        dg += tl.load(slot_ptrs, mask=choice < P, other=0.0)
        slot_ptrs += P
    tl.store(dg_ptr + choice, dg.to(dg_ptr.dtype.element_ty), mask=choice < P)


@triton.jit
def up_weight_kernel(
    x_ptr, da_ptr, db_ptr, order_ptr, offsets_ptr, dw1_ptr, dw3_ptr, D, F, C,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1)
    dw1 = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dw3 = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        choice = tl.load(order_ptr + i, mask=i < end, other=0)
        x = tl.trans(load_tile(x_ptr, choice // C, d, i < end, D))
        dw1 = tl.dot(x, load_tile(da_ptr, i, f, i < end, F), dw1, input_precision=PRECISION)
        dw3 = tl.dot(x, load_tile(db_ptr, i, f, i < end, F), dw3, input_precision=PRECISION)
    store_tile(dw1_ptr + expert * D * F, dw1, d, f, d < D, F)
    store_tile(dw3_ptr + expert * D * F, dw3, d, f, d < D, F)


@triton.jit
def down_weight_kernel(
    gh_ptr, dy_ptr, order_ptr, offsets_ptr, dw2_ptr, D, F, C, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1)
    dw2 = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        choice = tl.load(order_ptr + i, mask=i < end, other=0)
        gh = tl.trans(load_tile(gh_ptr, i, f, i < end, F))
        dw2 = tl.dot(gh, load_tile(dy_ptr, choice // C, d, i < end, D), dw2, input_precision=PRECISION)
    store_tile(dw2_ptr + expert * F * D, dw2, f, d, f < F, D)


@triton.jit
def input_kernel(
    da_ptr, db_ptr, w1_ptr, w3_ptr, order_ptr, offsets_ptr, table_ptr, share_ptr, D, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a choice adds to dx of its token, at the choice's place."""
    expert, i, inside, choice = own_rows(order_ptr, offsets_ptr, table_ptr, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    share = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        w1 = tl.trans(load_tile(w1_ptr + expert * D * F, d, f, d < D, F))
        w3 = tl.trans(load_tile(w3_ptr + expert * D * F, d, f, d < D, F))
        share = tl.dot(load_tile(da_ptr, i, f, inside, F), w1, share, input_precision=PRECISION)
        share = tl.dot(load_tile(db_ptr, i, f, inside, F), w3, share, input_precision=PRECISION)
    store_tile(share_ptr, share, choice, d, inside, D)


class MoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w3, w2, g, order, offsets):
        inputs = tuple(tensor.contiguous() for tensor in (x, w1, w3, w2, g, order, offsets))
        ctx.save_for_backward(*inputs)
        return moe_mlp(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, w1, w3, w2, g, order, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        (T, D), (E, _, F), C = x.shape, w1.shape, g.shape[1]
        tiles, needed, P = tiling(x), ctx.needs_input_grad, T * C
        rows = (order, offsets, tile_table(offsets, tiles["BLOCK"]))
        d_tiles, f_tiles = (triton.cdiv(size, tiles["BLOCK"]) for size in (D, F))
        gh, da, db = (torch.empty((P, F), device=x.device, dtype=x.dtype) for _ in range(3))
        slots = torch.empty((f_tiles, P), device=x.device, dtype=torch.float32)
        rebuild_kernel[(rows[2].shape[0], f_tiles)](
            x, w1, w3, w2, g, dy, *rows, gh, da, db, slots, D, F, C, P, **tiles
        )
        dx = dw1 = dw3 = dw2 = dg = None
        if needed[0]:
            share = torch.empty((P, D), device=x.device, dtype=torch.float32)
            input_kernel[(rows[2].shape[0], d_tiles)](da, db, w1, w3, *rows, share, D, F, **tiles)
            dx = combine(share, g, x, False)
        if needed[1] or needed[2]:
            dw1, dw3 = torch.empty_like(w1), torch.empty_like(w3)
            up_weight_kernel[(d_tiles, f_tiles, E)](x, da, db, order, offsets, dw1, dw3, D, F, C, **tiles)
        if needed[3]:
            dw2 = torch.empty_like(w2)
            down_weight_kernel[(f_tiles, d_tiles, E)](gh, dy, order, offsets, dw2, D, F, C, **tiles)
        if needed[4]:
            dg = torch.empty_like(g)
            gate_kernel[(triton.cdiv(P, 256),)](slots, dg, f_tiles, P, BLOCK=256)
        return dx, dw1 if needed[1] else None, dw3 if needed[2] else None, dw2, dg, None, None


def moe_mlp_autograd(x, w1, w3, w2, g, order, offsets):
    return MoeMlp.apply(x, w1, w3, w2, g, order, offsets)
