"""Message passing with an edge network: an edge sees both its ends and its own features; nodes add messages.

Forward    edge e goes from s to d:  z_e = h_s A + h_d B + r_e C + b,  m_e = silu(z_e),  y_i = sum over the
           in-edges e of i of m_e.  w = [A; B; C] is one matrix for the concatenation [h_s, h_d, r_e]
Backward   g_e = dy_d * silu'(z_e),  silu'(z) = t (1 + z (1 - t)), t = sigmoid(z).  With the sums over a
           node's edges  S_j = sum of g_e over out-edges,  T_i = sum of g_e over in-edges:
           dr_e = g_e C^T,  dh_i = S_i A^T + T_i B^T,  dC = sum_e r_e^T g_e,  db = sum_i T_i,
           dA = sum_e h_s^T g_e = sum_j h_j^T S_j,  dB = sum_i h_i^T T_i

Forward schedule: a program owns a tile of edges by outputs, gathers the rows of both ends as operands of two
products beside r C, and stores messages; a second kernel's programs own nodes and add their in-edges (CSR).
Backward schedule: z is rebuilt by the forward's tile, which also gathers dy_d and stores g, the only tensor
of edges by outputs. Everything after is linear in g, so a sum over the edges of a node may be taken before
the product with a matrix instead of after it. An owner of each node adds S and T from its two edge lists, and
the products for dh, dA and dB then run over nodes, often ten times fewer than edges, without any gather. Only
r lives on edges: dr and dC are products over them. S and T stay in fp32, as db adds T once more. The weight's
three blocks are one owner's grid, whose long sums are split into slots and added by a last kernel.

op: edge_mlp
schedule: segment_gather, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_product(acc, x_ptr, w_ptr, rows, inside, f, D, F, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """acc + x[rows] w for a tile of w's columns f; x has D columns."""
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, d, f, d < D, F)
        acc = tl.dot(load_tile(x_ptr, rows, d, inside, D), w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def preactivation(
    h_ptr, r_ptr, w_ptr, b_ptr, e, source, target, f, E, D, DR, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    z = add_product(z, h_ptr, w_ptr, source, e < E, f, D, F, PRECISION, BLOCK)
    z = add_product(z, h_ptr, w_ptr + D * F, target, e < E, f, D, F, PRECISION, BLOCK)
    z = add_product(z, r_ptr, w_ptr + 2 * D * F, e, e < E, f, DR, F, PRECISION, BLOCK)
    return z + tl.load(b_ptr + f, mask=f < F, other=0.0).to(tl.float32)[None, :]


@triton.jit
def message_kernel(
    h_ptr, r_ptr, w_ptr, b_ptr, src_ptr, dst_ptr, m_ptr, E, D, DR, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_ptr + e, mask=e < E, other=0)
    target = tl.load(dst_ptr + e, mask=e < E, other=0)
    z = preactivation(h_ptr, r_ptr, w_ptr, b_ptr, e, source, target, f, E, D, DR, F, PRECISION, BLOCK)
    store_tile(m_ptr, z * tl.sigmoid(z), e, f, e < E, F)


@triton.jit
def node_sum_kernel(
    g_ptr, begin_ptr, edge_ptr, out_ptr, F, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    last = tl.load(begin_ptr + node + 1)
    acc = tl.zeros([BLOCK_E, BLOCK_F], dtype=tl.float32)
    for start in range(tl.load(begin_ptr + node), last, BLOCK_E):
        at = start + tl.arange(0, BLOCK_E)
        e = tl.load(edge_ptr + at, mask=at < last, other=0)
        acc += load_tile(g_ptr, e, f, at < last, F).to(tl.float32)
    total = tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + node * F + f, total, mask=f < F)


def node_sums(g, end, nodes, dtype):
    """The rows of g, one an edge, added at the node that `end` gives for the edge."""
    edge = torch.argsort(end, stable=True)
    begin = torch.searchsorted(end[edge], torch.arange(nodes + 1, device=end.device))
    out = torch.empty((nodes, g.shape[1]), device=g.device, dtype=dtype)
    grid = (nodes, triton.cdiv(g.shape[1], 64))
    node_sum_kernel[grid](g, begin, edge, out, g.shape[1], BLOCK_E=8, BLOCK_F=64)
    return out


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def edge_mlp(h, r, w, b, src, dst):
    """h: (nodes, D); r: (E, DR); w: (2 D + DR, F); b: (F); src, dst: int64 (E), in any order."""
    (nodes, D), (E, DR), F = h.shape, r.shape, w.shape[1]
    if w.shape[0] != 2 * D + DR:
        raise ValueError(f"w has {w.shape[0]} rows for 2 {D} + {DR} features")
    h, r, w, b, src, dst = (x.contiguous() for x in (h, r, w, b, src, dst))
    m, tiles = torch.empty((E, F), device=h.device, dtype=h.dtype), tiles_of(h)
    grid = (triton.cdiv(E, tiles["BLOCK"]), triton.cdiv(F, tiles["BLOCK"]))
    message_kernel[grid](h, r, w, b, src, dst, m, E, D, DR, F, **tiles)
    return node_sums(m, dst, nodes, h.dtype)


def reference(h, r, w, b, src, dst):
    m = torch.nn.functional.silu(torch.cat([h[src], h[dst], r], dim=1) @ w + b)
    return h.new_zeros(h.shape[0], w.shape[1]).index_add(0, dst, m)


SWEEP = [
    {"nodes": 8192, "E": 131072, "D": 128, "DR": 32, "F": 128},
    {"nodes": 3001, "E": 50021, "D": 70, "DR": 5, "F": 100},
]
SWEEP_CPU = [
    {"nodes": 13, "E": 58, "D": 16, "DR": 4, "F": 32},
    {"nodes": 5, "E": 35, "D": 35, "DR": 9, "F": 11},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    nodes, E, D, DR, F = (dims[name] for name in ("nodes", "E", "D", "DR", "F"))
    h = torch.randn(nodes, D, device=device, dtype=dtype)
    r = torch.randn(E, DR, device=device, dtype=dtype)
    w = torch.randn(2 * D + DR, F, device=device, dtype=dtype) / max(1, 2 * D + DR) ** 0.5
    src, dst = (torch.randint(0, nodes, (E,), device=device) for _ in range(2))
    return h, r, w, torch.randn(F, device=device, dtype=dtype), src, dst


# ---- backward ----

MAX_SLOTS = 32


@triton.jit
def preactivation_grad_kernel(
    h_ptr, r_ptr, w_ptr, b_ptr, src_ptr, dst_ptr, dy_ptr, g_ptr, E, D, DR, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_ptr + e, mask=e < E, other=0)
    target = tl.load(dst_ptr + e, mask=e < E, other=0)
    z = preactivation(h_ptr, r_ptr, w_ptr, b_ptr, e, source, target, f, E, D, DR, F, PRECISION, BLOCK)
    t = tl.sigmoid(z)
    g = load_tile(dy_ptr, target, f, e < E, F).to(tl.float32) * t * (1 + z * (1 - t))
    store_tile(g_ptr, g, e, f, e < E, F)


@triton.jit
def add_transposed(acc, g_ptr, w_ptr, rows, M, d, D, F, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, d, f, d < D, F)
        g = load_tile(g_ptr, rows, f, rows < M, F).to(w.dtype)
        acc = tl.dot(g, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def input_grad_kernel(
    s_ptr, t_ptr, w_ptr, out_ptr, M, D, F,
    BOTH: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = S w[:D]^T, and with BOTH also + T w[D:2D]^T."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    acc = add_transposed(acc, s_ptr, w_ptr, rows, M, d, D, F, PRECISION, BLOCK)
    if BOTH:
        acc = add_transposed(acc, t_ptr, w_ptr + D * F, rows, M, d, D, F, PRECISION, BLOCK)
    store_tile(out_ptr, acc, rows, d, rows < M, D)


@triton.jit
def weight_parts_kernel(
    x_ptr, g_ptr, part_ptr, M, D, F, TOTAL, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One slot's part of x^T g over the rows of slot, slot + G, ..; a part has TOTAL rows, D of them here."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.program_id(2).to(tl.int64)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * BLOCK, M, tl.num_programs(2) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, rows, d, rows < M, D)
        g = load_tile(g_ptr, rows, f, rows < M, F).to(x.dtype)
        dw = tl.dot(tl.trans(x), g, dw, input_precision=PRECISION)
    store_tile(part_ptr + slot * TOTAL * F, dw, d, f, d < D, F)


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        acc += load_tile(x_ptr, m, n, m < M, N).to(tl.float32)
    tl.store(out_ptr + n, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=n < N)


def column_sum(x, shape, dtype):
    out = torch.empty(shape, device=x.device, dtype=dtype)
    M, N = x.shape[0], out.numel()
    column_sum_kernel[(triton.cdiv(N, 128),)](x, out, M, N, BLOCK_M=16, BLOCK_N=128)
    return out


def weight_grad(h, r, w, g, S, T, tiles):
    (nodes, D), (E, DR), (TOTAL, F) = h.shape, r.shape, w.shape
    part = torch.empty((MAX_SLOTS, TOTAL, F), device=h.device, dtype=torch.float32)
    for x, rows_of_g, M, first, width in (
        (h, S, nodes, 0, D),
        (h, T, nodes, D, D),
        (r, g, E, 2 * D, DR),
    ):
        grid = (triton.cdiv(width, tiles["BLOCK"]), triton.cdiv(F, tiles["BLOCK"]), MAX_SLOTS)
        weight_parts_kernel[grid](x, rows_of_g, part[:, first:], M, width, F, TOTAL, **tiles)
    return column_sum(part, w.shape, w.dtype)


class EdgeMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, r, w, b, src, dst):
        h, r, w, b, src, dst = (x.contiguous() for x in (h, r, w, b, src, dst))
        ctx.save_for_backward(h, r, w, b, src, dst)
        return edge_mlp(h, r, w, b, src, dst)

    @staticmethod
    def backward(ctx, dy):
        h, r, w, b, src, dst = ctx.saved_tensors
        (nodes, D), (E, DR), F = h.shape, r.shape, w.shape[1]
        tiles, needs = tiles_of(h), ctx.needs_input_grad
        BLOCK = tiles["BLOCK"]
        g = torch.empty((E, F), device=h.device, dtype=h.dtype)
        grid = (triton.cdiv(E, BLOCK), triton.cdiv(F, BLOCK))
        preactivation_grad_kernel[grid](h, r, w, b, src, dst, dy.contiguous(), g, E, D, DR, F, **tiles)
        dh = dr = dw = db = None
        if needs[1]:
            dr = torch.empty_like(r)
            grid = (triton.cdiv(E, BLOCK), triton.cdiv(DR, BLOCK))
            input_grad_kernel[grid](g, g, w[2 * D :], dr, E, DR, F, BOTH=False, **tiles)
        if needs[0] or needs[2] or needs[3]:
            T = node_sums(g, dst, nodes, torch.float32)
            S = node_sums(g, src, nodes, torch.float32) if needs[0] or needs[2] else None
            if needs[0]:
                dh = torch.empty_like(h)
                grid = (triton.cdiv(nodes, BLOCK), triton.cdiv(D, BLOCK))
                input_grad_kernel[grid](S, T, w, dh, nodes, D, F, BOTH=True, **tiles)
            if needs[2]:
                dw = weight_grad(h, r, w, g, S, T, tiles)
            if needs[3]:
                db = column_sum(T, b.shape, b.dtype)
        return dh, dr, dw, db, None, None


def edge_mlp_autograd(h, r, w, b, src, dst):
    return EdgeMLP.apply(h, r, w, b, src, dst)
