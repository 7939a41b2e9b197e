"""Relational graph convolution: an edge's relation chooses the matrix that its message goes through.

Forward    y_i = sum over the edges e = (j -> i) with relation r of c_e x_j W_r,  c_e a given norm, such as
           one by the number of i's edges of that relation
Backward   dx_j = sum over the edges e = (j -> i) of c_e dy_i W_r^T:  the same sum on the graph with its edges
           turned round and its matrices transposed;   dW_r = sum over r's edges of c_e x_j^T dy_i

Forward schedule: edges come sorted by relation. A program owns (relation, tile of its edges, tile of
outputs), gathers the rows of x at one end, multiplies them with the one W_r, and adds c_e times the result to
the rows at the other end by atomics: a node's edges are spread over relations, so no program has them all,
and no message is stored.
Backward schedule: for dx the forward's kernel runs again, with the ends exchanged and W read transposed.
Tiles are then of x's columns. W_r was read by all tiles of its relation, so it gets an owner: (relation,
slot, tile of W_r) walks every G-th tile of the relation's edges with both ends gathered; relations differ in
size by orders of magnitude, and the slots keep the largest from being one program's. A second kernel adds the
slots.

op: rgcn
schedule: atomic_accumulate, swap_owner, partials_then_reduce
difficulty: 4
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
def typed_linear_kernel(
    x_ptr, w_ptr, from_ptr, to_ptr, c_ptr, begin_ptr, y_ptr, D, F, step_d, step_f,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[to_e] += c_e x[from_e] W_r, where W_r[d, f] is at d step_d + f step_f."""
    r = tl.program_id(0).to(tl.int64)
    end = tl.load(begin_ptr + r + 1)
    first = tl.load(begin_ptr + r) + tl.program_id(1) * BLOCK
    f = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if first < end:
        e = first + tl.arange(0, BLOCK)
        source = tl.load(from_ptr + e, mask=e < end, other=0)
        target = tl.load(to_ptr + e, mask=e < end, other=0)
        c = tl.load(c_ptr + e, mask=e < end, other=0.0).to(tl.float32)
        y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            w_mask = (d[:, None] < D) & (f[None, :] < F)
            w_offs = r * D * F + d[:, None] * step_d + f[None, :] * step_f
            w = tl.load(w_ptr + w_offs, mask=w_mask, other=0.0)
            y = tl.dot(load_tile(x_ptr, source, d, e < end, D), w, y, input_precision=PRECISION)
        mask = (e[:, None] < end) & (f[None, :] < F)
        tl.atomic_add(y_ptr + target[:, None] * F + f[None, :], c[:, None] * y, mask=mask, sem="relaxed")


def typed_linear(x, w, origin, to, c, begin, most, nodes, transposed):
    relations, F, D = w.shape if transposed else (w.shape[0], w.shape[2], w.shape[1])
    step_d, step_f = (1, D) if transposed else (F, 1)
    y, tiles = torch.zeros((nodes, F), device=x.device, dtype=torch.float32), tiles_of(x)
    grid = (relations, triton.cdiv(most, tiles["BLOCK"]), triton.cdiv(F, tiles["BLOCK"]))
    typed_linear_kernel[grid](x, w, origin, to, c, begin, y, D, F, step_d, step_f, **tiles)
    return y.to(x.dtype)


@autodiff(inputs_require_grad=(0, 1))
def rgcn(x, w, src, dst, c, begin, most):
    """x: (nodes, D); w: (relations, D, F); src, dst: int64 (E), and c: (E), sorted by relation; begin: int64
    (relations + 1), where each relation's edges begin, and E; most: no less than any relation's edges."""
    x, w, src, dst, c = (t.contiguous() for t in (x, w, src, dst, c))
    return typed_linear(x, w, src, dst, c, begin, most, x.shape[0], False)


def reference(x, w, src, dst, c, begin, most):
    y = x.new_zeros(x.shape[0], w.shape[2])
    for r in range(w.shape[0]):
        own = slice(int(begin[r]), int(begin[r + 1]))
        y = y.index_add(0, dst[own], c[own, None] * (x[src[own]] @ w[r]))
    return y


SWEEP = [
    {"nodes": 20000, "E": 200000, "relations": 24, "D": 128, "F": 128},
    {"nodes": 5003, "E": 60001, "relations": 91, "D": 70, "F": 33},
]
SWEEP_CPU = [
    {"nodes": 16, "E": 64, "relations": 3, "D": 16, "F": 20},
    {"nodes": 7, "E": 50, "relations": 2, "D": 40, "F": 9},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Relations of very different sizes, some of them perhaps without an edge."""
    nodes, E, relations, D, F = (dims[name] for name in ("nodes", "E", "relations", "D", "F"))
    relation = (torch.rand(E, device=device) ** 2 * relations).long().sort().values
    begin = torch.searchsorted(relation, torch.arange(relations + 1, device=device))
    most = int(begin.diff().max()) if relations else 0
    x = torch.randn(nodes, D, device=device, dtype=dtype)
    w = torch.randn(relations, D, F, device=device, dtype=dtype) / max(1, D) ** 0.5
    src, dst = (torch.randint(0, nodes, (E,), device=device) for _ in range(2))
    c = (1 / (1 + torch.rand(E, device=device))).to(dtype)
    return x, w, src, dst, c, begin, most


# ---- backward ----

MAX_SLOTS = 8


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, src_ptr, dst_ptr, c_ptr, begin_ptr, part_ptr, relations, D, F,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    tiles_f = tl.cdiv(F, BLOCK)
    d = tl.program_id(2) // tiles_f * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(2) % tiles_f * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(begin_ptr + r + 1)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(tl.load(begin_ptr + r) + slot * BLOCK, end, tl.num_programs(1) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        c = tl.load(c_ptr + e, mask=e < end, other=0.0).to(tl.float32)
        x = load_tile(x_ptr, tl.load(src_ptr + e, mask=e < end, other=0), d, e < end, D)
        dy = load_tile(dy_ptr, tl.load(dst_ptr + e, mask=e < end, other=0), f, e < end, F)
        weighed = (dy.to(tl.float32) * c[:, None]).to(x.dtype)
        dw = tl.dot(tl.trans(x), weighed, dw, input_precision=PRECISION)
    mask = (d[:, None] < D) & (f[None, :] < F)
    part = part_ptr + (slot * relations + r) * D * F
    tl.store(part + d[:, None] * F + f[None, :], dw, mask=mask)


@triton.jit
def add_slots_kernel(part_ptr, dw_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=at < n)


class RGCN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, src, dst, c, begin, most):
        x, w, src, dst, c, begin = (t.contiguous() for t in (x, w, src, dst, c, begin))
        ctx.save_for_backward(x, w, src, dst, c, begin)
        ctx.most = most
        return rgcn(x, w, src, dst, c, begin, most)

    @staticmethod
    def backward(ctx, dy):
        x, w, src, dst, c, begin = ctx.saved_tensors
        dy, (relations, D, F), tiles = dy.contiguous(), w.shape, tiles_of(x)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = typed_linear(dy, w, dst, src, c, begin, ctx.most, x.shape[0], True)
        if ctx.needs_input_grad[1]:
            BLOCK, dw = tiles["BLOCK"], torch.empty_like(w)
            slots = max(1, min(MAX_SLOTS, triton.cdiv(ctx.most, BLOCK)))
            part = torch.empty((slots, *w.shape), device=w.device, dtype=torch.float32)
            grid = (relations, slots, triton.cdiv(D, BLOCK) * triton.cdiv(F, BLOCK))
            weight_parts_kernel[grid](x, dy, src, dst, c, begin, part, relations, D, F, **tiles)
            add_slots_kernel[(triton.cdiv(dw.numel(), 256),)](part, dw, dw.numel(), slots, BLOCK=256)
        return dx, dw, None, None, None, None, None


def rgcn_autograd(x, w, src, dst, c, begin, most):
    return RGCN.apply(x, w, src, dst, c, begin, most)
