"""One dot product an edge and head: attention logits on a graph, a sampled dense-dense product.

Forward    s_eh = <u_{src(e), h}, v_{dst(e), h}>
Backward   du_jh = sum over the edges e with src(e) = j of ds_eh v_{dst(e), h},
           dv_ih = sum over the edges e with dst(e) = i of ds_eh u_{src(e), h}

Forward schedule: a program owns (tile of edges, head), gathers two tiles of rows and reduces their product.
Backward schedule: both gradients sum over edges, but group them differently, so each gets its own list: edges
sorted by source for du, by destination for dv. One kernel serves both, told which end owns and which end is
gathered: a program owns (node, head), walks the node's edges with the row in registers and stores it once. It
takes edges a tile at a time, so that the rows of a tile are loaded together; with one after the other each
load would wait for the last index.

op: sddmm
schedule: segment_gather
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def sddmm_kernel(
    u_ptr, v_ptr, src_ptr, dst_ptr, s_ptr, E, H, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.program_id(1)
    j = tl.load(src_ptr + e, mask=e < E, other=0)
    i = tl.load(dst_ptr + e, mask=e < E, other=0)
    products = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (e[:, None] < E) & (d[None, :] < D)
        u = tl.load(u_ptr + (j[:, None] * H + h) * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + (i[:, None] * H + h) * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        products += u * v
    s = tl.sum(products, axis=1)
    tl.store(s_ptr + e * H + h, s.to(s_ptr.dtype.element_ty), mask=e < E)


@autodiff(inputs_require_grad=(0, 1))
def sddmm(u, v, src, dst):
    """u: (sources, H, D); v: (destinations, H, D); src, dst: int64 (E); gives (E, H)."""
    u, v, src, dst = u.contiguous(), v.contiguous(), src.contiguous(), dst.contiguous()
    (_, H, D), E = u.shape, src.numel()
    s = torch.empty((E, H), device=u.device, dtype=u.dtype)
    sddmm_kernel[(triton.cdiv(E, 32), H)](u, v, src, dst, s, E, H, D, BLOCK_E=32, BLOCK_D=32)
    return s


def reference(u, v, src, dst):
    return (u[src] * v[dst]).sum(-1)


SWEEP = [
    {"src": 40000, "dst": 40000, "E": 600000, "H": 4, "D": 32},
    {"src": 3001, "dst": 20011, "E": 150001, "H": 3, "D": 80},
]
SWEEP_CPU = [
    {"src": 15, "dst": 9, "E": 66, "H": 2, "D": 16},
    {"src": 4, "dst": 21, "E": 50, "H": 1, "D": 41},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    E, H, D = dims["E"], dims["H"], dims["D"]
    u = torch.randn(dims["src"], H, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    v = torch.randn(dims["dst"], H, D, device=device, dtype=dtype)
    return u, v, *(torch.randint(0, dims[end], (E,), device=device) for end in ("src", "dst"))


# ---- backward ----


@triton.jit
def node_gather_kernel(
    ds_ptr, other_ptr, begin_ptr, edge_ptr, end_ptr, out_ptr, H, D,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_node = sum over the node's edges e of ds_e other_{end(e)}."""
    node = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    last = tl.load(begin_ptr + node + 1)
    acc = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(begin_ptr + node), last, BLOCK_E):
        at = start + tl.arange(0, BLOCK_E)
        e = tl.load(edge_ptr + at, mask=at < last, other=0)
        ds = tl.load(ds_ptr + e * H + h, mask=at < last, other=0.0).to(tl.float32)
        end = tl.load(end_ptr + e, mask=at < last, other=0)
        mask = (at[:, None] < last) & (d[None, :] < D)
        row = tl.load(other_ptr + (end[:, None] * H + h) * D + d[None, :], mask=mask, other=0.0)
        acc += ds[:, None] * row.to(tl.float32)
    out = tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (node * H + h) * D + d, out, mask=d < D)


def gather_to(nodes, owner, other_end, ds, other):
    """The gradient of the rows that `owner`, an end of each edge, points at."""
    H, D = other.shape[1:]
    edge = torch.argsort(owner, stable=True)
    begin = torch.searchsorted(owner[edge], torch.arange(nodes + 1, device=owner.device))
    out = torch.empty((nodes, H, D), device=other.device, dtype=other.dtype)
    grid = (nodes, H, triton.cdiv(D, 32))
    node_gather_kernel[grid](ds, other, begin, edge, other_end, out, H, D, BLOCK_E=16, BLOCK_D=32)
    return out


class SDDMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, v, src, dst):
        u, v, src, dst = u.contiguous(), v.contiguous(), src.contiguous(), dst.contiguous()
        ctx.save_for_backward(u, v, src, dst)
        return sddmm(u, v, src, dst)

    @staticmethod
    def backward(ctx, ds):
        u, v, src, dst = ctx.saved_tensors
        ds, needs = ds.contiguous(), ctx.needs_input_grad
        du = gather_to(u.shape[0], src, dst, ds, v) if needs[0] else None
        dv = gather_to(v.shape[0], dst, src, ds, u) if needs[1] else None
        return du, dv, None, None


def sddmm_autograd(u, v, src, dst):
    return SDDMM.apply(u, v, src, dst)
