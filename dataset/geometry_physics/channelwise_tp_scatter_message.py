"""Messages of an equivariant network: each edge multiplies its source's features by its direction, channel by
channel, and a node adds up what comes in.

Forward    a node has a scalar s and a vector v for each channel, an edge a direction Y and five weights a
           channel, a to e;  m_i = sum over the edges from j to i of
           scalar:  a s_j + b <v_j, Y>,      vector:  c s_j Y + d v_j + e v_j x Y
Backward   with g, h the gradients of m_i's scalar and vector, for each edge to i:
           da = g s,  db = g <v, Y>,  dc = s <h, Y>,  dd = <h, v>,  de = <h, v x Y>;
           dY = sum over channels of b g v + c s h + e h x v,   as <h, v x Y> = <Y, h x v>;
           ds_j = sum over j's edges of a g + c <h, Y>,
           dv_j = sum over j's edges of b g Y + d h + e Y x h

Forward schedule: edges are sorted by destination. A program owns a node and its channels, walks its edges,
gathers the sources' features, and keeps the sum in registers: messages are never stored, no atomics.
Backward schedule: an edge's own gradients need g and h of its destination, so the destination's owner walks
its edges again with these in registers and the sources gathered; all channels are in one program, so dY is
one sum inside it. Sources are read by many destinations: a sort of the edges by source gives each node its
outgoing list, and the node's owner gathers g and h of the destinations at the other ends. Weights are the
large tensor, five numbers an edge and channel, and both walks read it once.

op: tensor_product_conv
schedule: segment_gather, swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_four(ptr, c, C):
    """Four rows of C: scalar and vector of a node or a message, or the first four weights of an edge."""
    at = ptr + c
    s = tl.load(at, mask=c < C, other=0.0)
    x = tl.load(at + C, mask=c < C, other=0.0)
    y = tl.load(at + 2 * C, mask=c < C, other=0.0)
    return s, x, y, tl.load(at + 3 * C, mask=c < C, other=0.0)


@triton.jit
def store_four(ptr, c, C, s, x, y, z):
    at = ptr + c
    tl.store(at, s, mask=c < C)
    tl.store(at + C, x, mask=c < C)
    tl.store(at + 2 * C, y, mask=c < C)
    tl.store(at + 3 * C, z, mask=c < C)


@triton.jit
def load_edge(y_ptr, w_ptr, edge, c, C):
    yx, yy, yz = tl.load(y_ptr + 3 * edge), tl.load(y_ptr + 3 * edge + 1), tl.load(y_ptr + 3 * edge + 2)
    w_ptr += edge * 5 * C
    wa, wb, wc, wd = load_four(w_ptr, c, C)
    return yx, yy, yz, wa, wb, wc, wd, tl.load(w_ptr + 4 * C + c, mask=c < C, other=0.0)


@triton.jit
def message_kernel(x_ptr, y_ptr, w_ptr, source_ptr, first_ptr, m_ptr, C, BLOCK: tl.constexpr):
    i, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ms = tl.zeros([BLOCK], dtype=tl.float32)
    mx = tl.zeros([BLOCK], dtype=tl.float32)
    my = tl.zeros([BLOCK], dtype=tl.float32)
    mz = tl.zeros([BLOCK], dtype=tl.float32)
    for edge in range(tl.load(first_ptr + i), tl.load(first_ptr + i + 1)):
        s, vx, vy, vz = load_four(x_ptr + tl.load(source_ptr + edge) * 4 * C, c, C)
        yx, yy, yz, wa, wb, wc, wd, we = load_edge(y_ptr, w_ptr, edge, c, C)
        ms += wa * s + wb * (vx * yx + vy * yy + vz * yz)
        mx += wc * s * yx + wd * vx + we * (vy * yz - vz * yy)
        my += wc * s * yy + wd * vy + we * (vz * yx - vx * yz)
        mz += wc * s * yz + wd * vz + we * (vx * yy - vy * yx)
    store_four(m_ptr + i * 4 * C, c, C, ms, mx, my, mz)


@autodiff(inputs_require_grad=(0, 1, 2))
def tp_messages(x, y, w, source, first):
    """x: float32 (nodes, 4, C), scalar and vector; y: (edges, 3); w: (edges, 5, C); source: int64 (edges);
    first: int64 (nodes + 1), where the edges to each node begin; gives (nodes, 4, C)."""
    (nodes, _, C), edges = x.shape, source.numel()
    if y.shape != (edges, 3) or w.shape != (edges, 5, C) or first.numel() != nodes + 1 or C > 1024:
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)}, w {tuple(w.shape)}, {edges} edges")
    inputs = [tensor.contiguous() for tensor in (x, y, w, source, first)]
    m = torch.empty((nodes, 4, C), device=x.device, dtype=x.dtype)
    message_kernel[(nodes,)](*inputs, m, C, BLOCK=triton.next_power_of_2(C))
    return m


def reference(x, y, w, source, first):
    s, v = x[source, :1], x[source, 1:]
    y = y[:, :, None]
    scalar = w[:, :1] * s + w[:, 1:2] * (v * y).sum(1, keepdim=True)
    vector = w[:, 2:3] * s * y + w[:, 3:4] * v + w[:, 4:] * torch.linalg.cross(v, y.expand_as(v), dim=1)
    target = torch.repeat_interleave(torch.arange(x.shape[0], device=x.device), first.diff())
    return torch.zeros_like(x).index_add(0, target, torch.cat([scalar, vector], dim=1))


SWEEP = [{"nodes": 8000, "edges": 160000, "C": 128}, {"nodes": 1201, "edges": 20011, "C": 90}]
SWEEP_CPU = [{"nodes": 7, "edges": 16, "C": 16}, {"nodes": 4, "edges": 9, "C": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    nodes, edges, C = dims["nodes"], dims["edges"], dims["C"]
    x = torch.randn(nodes, 4, C, device=device, dtype=dtype)
    y = torch.randn(edges, 3, device=device, dtype=dtype)
    w = torch.randn(edges, 5, C, device=device, dtype=dtype)
    source, target = (torch.randint(0, nodes, (edges,), device=device) for _ in range(2))
    first = torch.searchsorted(target.sort().values, torch.arange(nodes + 1, device=device))
    return x, y / y.norm(dim=1, keepdim=True), w, source, first


# ---- backward ----


@triton.jit
def edge_kernel(x_ptr, y_ptr, w_ptr, source_ptr, first_ptr, dm_ptr, dy_ptr, dw_ptr, C, BLOCK: tl.constexpr):
    i, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    g, hx, hy, hz = load_four(dm_ptr + i * 4 * C, c, C)
    for edge in range(tl.load(first_ptr + i), tl.load(first_ptr + i + 1)):
        s, vx, vy, vz = load_four(x_ptr + tl.load(source_ptr + edge) * 4 * C, c, C)
        yx, yy, yz, _, wb, wc, _, we = load_edge(y_ptr, w_ptr, edge, c, C)
        kx, ky, kz = hy * vz - hz * vy, hz * vx - hx * vz, hx * vy - hy * vx  # h x v
        dc = s * (hx * yx + hy * yy + hz * yz)
        dd = hx * vx + hy * vy + hz * vz
        db = g * (vx * yx + vy * yy + vz * yz)
        store_four(dw_ptr + edge * 5 * C, c, C, g * s, db, dc, dd)
        tl.store(dw_ptr + edge * 5 * C + 4 * C + c, kx * yx + ky * yy + kz * yz, mask=c < C)
        bg, cs = wb * g, wc * s
        tl.store(dy_ptr + 3 * edge, tl.sum(bg * vx + cs * hx + we * kx, axis=0))
        tl.store(dy_ptr + 3 * edge + 1, tl.sum(bg * vy + cs * hy + we * ky, axis=0))
        tl.store(dy_ptr + 3 * edge + 2, tl.sum(bg * vz + cs * hz + we * kz, axis=0))


@triton.jit
def source_kernel(y_ptr, w_ptr, out_ptr, target_ptr, first_ptr, dm_ptr, dx_ptr, C, BLOCK: tl.constexpr):
    """out: the edges by source, first: where those of each node begin; target: of each edge."""
    j, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    dy = tl.zeros([BLOCK], dtype=tl.float32)
    dz = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(tl.load(first_ptr + j), tl.load(first_ptr + j + 1)):
        edge = tl.load(out_ptr + place)
        g, hx, hy, hz = load_four(dm_ptr + tl.load(target_ptr + edge) * 4 * C, c, C)
        yx, yy, yz, wa, wb, wc, wd, we = load_edge(y_ptr, w_ptr, edge, c, C)
        ds += wa * g + wc * (hx * yx + hy * yy + hz * yz)
        dx += wb * g * yx + wd * hx + we * (yy * hz - yz * hy)
        dy += wb * g * yy + wd * hy + we * (yz * hx - yx * hz)
        dz += wb * g * yz + wd * hz + we * (yx * hy - yy * hx)
    store_four(dx_ptr + j * 4 * C, c, C, ds, dx, dy, dz)


class TPMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, w, source, first):
        inputs = [tensor.contiguous() for tensor in (x, y, w, source, first)]
        ctx.save_for_backward(*inputs)
        return tp_messages(*inputs)

    @staticmethod
    def backward(ctx, dm):
        x, y, w, source, first = ctx.saved_tensors
        (nodes, _, C), needs, dm = x.shape, ctx.needs_input_grad, dm.contiguous()
        BLOCK, node = triton.next_power_of_2(C), torch.arange(nodes + 1, device=x.device)
        dx = dy = dw = None
        if needs[0]:
            dx = torch.empty_like(x)
            by_source, out = source.sort(stable=True)
            target = torch.repeat_interleave(node[:-1], first.diff(), output_size=source.numel())
            outgoing = torch.searchsorted(by_source, node)
            source_kernel[(nodes,)](y, w, out, target, outgoing, dm, dx, C, BLOCK=BLOCK)
        if needs[1] or needs[2]:
            dy, dw = torch.empty_like(y), torch.empty_like(w)
            edge_kernel[(nodes,)](x, y, w, source, first, dm, dy, dw, C, BLOCK=BLOCK)
        return dx, dy if needs[1] else None, dw if needs[2] else None, None, None


def tp_messages_autograd(x, y, w, source, first):
    return TPMessages.apply(x, y, w, source, first)
