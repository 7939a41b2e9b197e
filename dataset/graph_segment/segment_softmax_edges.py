"""Softmax of edge scores over the in-edges of each node, a head at a time; edges lie in any order.

Forward    a_e = exp(s_e) / sum over the edges f of e's node of exp(s_f)
Backward   ds_e = a_e (da_e - t),  t = sum over the edges f of e's node of a_f da_f

Forward schedule: a lane owns (node, head) and walks the node's list of edges once for an online maximum and
sum and once to write. Most nodes have few edges, so a program a node would leave its lanes idle: a program
owns a tile of lanes instead and walks to the longest list among them. Heads of a node are neighbouring lanes
and read neighbouring scores.
Backward schedule: the same lanes and lists. The first walk sums t in a register, the second corrects and
stores. All edges of a sum belong to one lane, so there are no atomics and no buffer of node size, although
neither edges nor scores were sorted; an edge is in one list, so every ds_e is stored once.

op: segment_softmax
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def lists_of(indptr_ptr, lanes, H, BLOCK: tl.constexpr):
    """First and last place of each lane's list, its head, and the most edges that a lane has."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(indptr_ptr + lane // H, mask=lane < lanes, other=0)
    end = tl.load(indptr_ptr + lane // H + 1, mask=lane < lanes, other=0)
    return begin, end, lane % H, tl.max(end - begin, axis=0)


@triton.jit
def segment_softmax_kernel(s_ptr, indptr_ptr, edge_ptr, a_ptr, lanes, H, BLOCK: tl.constexpr):
    begin, end, head, longest = lists_of(indptr_ptr, lanes, H, BLOCK)
    m = tl.full([BLOCK], -1e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(longest):
        mask = begin + step < end
        e = tl.load(edge_ptr + begin + step, mask=mask, other=0)
        s = tl.load(s_ptr + e * H + head, mask=mask, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, s)
        total = total * tl.exp(m - m_new) + tl.exp(s - m_new)
        m = m_new
    for step in range(longest):
        mask = begin + step < end
        e = tl.load(edge_ptr + begin + step, mask=mask, other=0)
        s = tl.load(s_ptr + e * H + head, mask=mask, other=0.0).to(tl.float32)
        a = tl.where(mask, tl.exp(s - m) / total, 0.0)
        tl.store(a_ptr + e * H + head, a.to(a_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def segment_softmax(s, indptr, edge):
    """s: (edges, H); indptr: int64 (nodes + 1); edge: int64 (edges), the in-edges of node i are
    edge[indptr[i]:indptr[i + 1]], and every edge is in one list."""
    s = s.contiguous()
    a = torch.empty_like(s)
    lanes = (indptr.numel() - 1) * s.shape[1]
    grid = (triton.cdiv(lanes, BLOCK),)
    segment_softmax_kernel[grid](s, indptr, edge, a, lanes, s.shape[1], BLOCK=BLOCK)
    return a


def reference(s, indptr, edge):
    nodes = indptr.numel() - 1
    node = torch.repeat_interleave(torch.arange(nodes, device=s.device), indptr.diff())
    sorted_s = s[edge]
    top = s.new_full((nodes, s.shape[1]), -1e30).index_reduce(0, node, sorted_s.detach(), "amax")
    p = torch.exp(sorted_s - top[node])
    a = p / s.new_zeros(nodes, s.shape[1]).index_add(0, node, p)[node]
    return torch.zeros_like(s).index_copy(0, edge, a)


SWEEP = [{"nodes": 169343, "E": 1166243, "H": 4}, {"nodes": 19717, "E": 888001, "H": 3}]
SWEEP_CPU = [{"nodes": 13, "E": 70, "H": 3}, {"nodes": 150, "E": 90, "H": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    nodes, E = dims["nodes"], dims["E"]
    destination = torch.randint(0, nodes, (E,), device=device)
    edge = torch.argsort(destination, stable=True)
    indptr = torch.searchsorted(destination[edge], torch.arange(nodes + 1, device=device))
    return torch.randn(E, dims["H"], device=device, dtype=dtype), indptr, edge


# ---- backward ----


@triton.jit
def segment_softmax_backward_kernel(
    a_ptr, indptr_ptr, edge_ptr, da_ptr, ds_ptr, lanes, H, BLOCK: tl.constexpr
):  # fmt: skip
    begin, end, head, longest = lists_of(indptr_ptr, lanes, H, BLOCK)
    t = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(longest):
        mask = begin + step < end
        e = tl.load(edge_ptr + begin + step, mask=mask, other=0)
        a = tl.load(a_ptr + e * H + head, mask=mask, other=0.0).to(tl.float32)
        t += a * tl.load(da_ptr + e * H + head, mask=mask, other=0.0).to(tl.float32)
    for step in range(longest):
        mask = begin + step < end
        e = tl.load(edge_ptr + begin + step, mask=mask, other=0)
        a = tl.load(a_ptr + e * H + head, mask=mask, other=0.0).to(tl.float32)
        da = tl.load(da_ptr + e * H + head, mask=mask, other=0.0).to(tl.float32)
        tl.store(ds_ptr + e * H + head, (a * (da - t)).to(ds_ptr.dtype.element_ty), mask=mask)


class SegmentSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, indptr, edge):
        a = segment_softmax(s, indptr, edge)
        ctx.save_for_backward(a, indptr, edge)
        return a

    @staticmethod
    def backward(ctx, da):
        a, indptr, edge = ctx.saved_tensors
        ds = torch.empty_like(a)
        lanes = (indptr.numel() - 1) * a.shape[1]
        segment_softmax_backward_kernel[(triton.cdiv(lanes, BLOCK),)](
            a, indptr, edge, da.contiguous(), ds, lanes, a.shape[1], BLOCK=BLOCK
        )
        return ds, None, None


def segment_softmax_autograd(s, indptr, edge):
    return SegmentSoftmax.apply(s, indptr, edge)
