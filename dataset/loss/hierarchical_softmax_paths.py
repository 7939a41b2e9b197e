"""Hierarchical softmax: a class is a leaf of a tree, and its probability a product of turns on the way.

Forward    for row i and step t of its path, at node n = n_it with the turn a_it = +1 or -1:
           z_it = <x_i, W_n>,  l_i = sum_t log(1 + exp(-a_it z_it))
Backward   h_it = dl_i/dz_it = -a_it sigmoid(-a_it z_it):
           dx_i = dl_i sum_t h_it W_n,  dW_n = sum of dl_i h_it x_i over the (i, t) with n_it = n

Forward schedule: a program owns a row, holds x_i in registers and walks its path of about log2 V nodes, one
gathered row of W each. It saves h, one number a step, as it has what the slope is made of.
Backward schedule: with h saved no score is made again: both gradients are weighted sums of gathered rows. dx
keeps the owner of the row. A node is passed by many rows, the root by all: the path table is inverted (a sort
of M T small numbers; its runs are the nodes), and the owner of (node, column chunk) walks its run and
gathers rows of x, a tile of them at a time, as runs near the root are long. Atomics would have all
rows queue at the root. Padding of short paths, node -1, sorts before all nodes and is in no run.

op: hierarchical_softmax
schedule: segment_gather, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def path_loss_kernel(x_ptr, w_ptr, node_ptr, turn_ptr, loss_ptr, h_ptr, T, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    loss = 0.0
    for t in range(T):
        node = tl.load(node_ptr + row * T + t)
        w = tl.load(w_ptr + node * D + d, mask=(d < D) & (node >= 0), other=0.0).to(tl.float32)
        a = tl.load(turn_ptr + row * T + t).to(tl.float32)
        u = a * tl.sum(x * w, axis=0)
        softplus = tl.where(u < 0, -u, 0.0) + tl.log(1 + tl.exp(tl.where(u < 0, u, -u)))
        loss += tl.where(node >= 0, softplus, 0.0)
        tl.store(h_ptr + row * T + t, tl.where(node >= 0, -a * tl.sigmoid(-u), 0.0))
    tl.store(loss_ptr + row, loss)


def path_loss_forward(x, w, nodes, turns):
    if nodes.shape != turns.shape:
        raise ValueError("nodes and turns must have one shape")
    (M, D), T = x.shape, nodes.shape[1]
    if D > 8192:
        raise ValueError(f"a width of {D} does not fit one tile")
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    h = torch.empty((M, T), device=x.device, dtype=torch.float32)
    path_loss_kernel[(M,)](x, w, nodes, turns, loss, h, T, D, BLOCK_D=triton.next_power_of_2(D))
    return loss, h


@autodiff(inputs_require_grad=(0, 1))
def hierarchical_softmax(x, w, nodes, turns):
    """x: (M, D); w: (nodes, D); nodes: int64 (M, T), the path of each row's class, -1 where it is shorter;
    turns: int8 (M, T), 1 or -1; gives (M) in float32."""
    return path_loss_forward(x.contiguous(), w.contiguous(), nodes.contiguous(), turns.contiguous())[0]


def reference(x, w, nodes, turns):
    z = (x[:, None] * w[nodes.clamp(min=0)]).sum(-1)
    return (torch.nn.functional.softplus(-turns.to(x.dtype) * z) * (nodes >= 0)).sum(-1)


SWEEP = [{"M": 16384, "D": 512, "nodes": 99999}, {"M": 8191, "D": 300, "nodes": 30000}]
SWEEP_CPU = [{"M": 25, "D": 24, "nodes": 15}, {"M": 70, "D": 140, "nodes": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """A binary tree in the order of a heap: the parent of number n is n // 2, leaves come after the nodes."""
    M, D, nodes = dims["M"], dims["D"], dims["nodes"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    w = torch.randn(nodes, D, device=device, dtype=dtype) / D**0.5
    leaf = torch.randint(nodes + 1, 2 * nodes + 2, (M, 1), device=device)
    steps = torch.arange((2 * nodes + 1).bit_length() - 1, 0, -1, device=device)
    turns = ((leaf >> (steps - 1)) & 1) * 2 - 1
    return x, w, (leaf >> steps) - 1, turns.to(torch.int8)


# ---- backward ----


@triton.jit
def dx_kernel(w_ptr, node_ptr, h_ptr, dloss_ptr, dx_ptr, T, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dx = tl.zeros([BLOCK_D], dtype=tl.float32)
    for t in range(T):
        node = tl.load(node_ptr + row * T + t)
        w = tl.load(w_ptr + node * D + d, mask=(d < D) & (node >= 0), other=0.0).to(tl.float32)
        dx += tl.load(h_ptr + row * T + t) * w
    dx *= tl.load(dloss_ptr + row)
    tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def dw_kernel(
    x_ptr, order_ptr, offsets_ptr, h_ptr, dloss_ptr, dw_ptr, T, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(offsets_ptr + node + 1)
    dw = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + node), end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        step = tl.load(order_ptr + i, mask=i < end, other=0)  # a place (row, t) of the path table
        rows = step // T
        dz = tl.load(h_ptr + step, mask=i < end, other=0.0)
        dz *= tl.load(dloss_ptr + rows, mask=i < end, other=0.0)
        mask = (i[:, None] < end) & (d[None, :] < D)
        x = tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dw += dz[:, None] * x
    tl.store(dw_ptr + node * D + d, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=d < D)


class HierarchicalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, nodes, turns):
        x, w, nodes, turns = x.contiguous(), w.contiguous(), nodes.contiguous(), turns.contiguous()
        loss, h = path_loss_forward(x, w, nodes, turns)
        ctx.save_for_backward(x, w, nodes, h)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, nodes, h = ctx.saved_tensors
        (M, D), T, count = x.shape, nodes.shape[1], w.shape[0]
        dloss = dloss.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            BLOCK = min(512, triton.next_power_of_2(D))
            dx_kernel[(M, triton.cdiv(D, BLOCK))](w, nodes, h, dloss, dx, T, D, BLOCK_D=BLOCK)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            by_node, order = torch.sort(nodes.view(-1))
            offsets = torch.searchsorted(by_node, torch.arange(count + 1, device=x.device))
            dw_kernel[(count, triton.cdiv(D, 128))](
                x, order, offsets, h, dloss, dw, T, D, BLOCK_M=16, BLOCK_D=128
            )
        return dx, dw, None, None


def hierarchical_softmax_autograd(x, w, nodes, turns):
    return HierarchicalSoftmax.apply(x, w, nodes, turns)
