"""Center loss: every embedding is pulled to the learned center of its class, and centers to their members.

Forward    l_i = |x_i - c_{y_i}|^2 / 2, one loss a row
Backward   with e_i = dl_i (x_i - c_{y_i}):  dx_i = e_i,  dc_k = -sum of e_i over the members i of class k

Forward schedule: a program owns several rows, gathers their centers and walks the width.
Backward schedule: dx is pointwise. A center is read by all its members, so its gradient is a segment sum:
rows are sorted by label, and the owner of (class, column chunk) walks its run of the order, gathering
members. No atomics, a fixed order, and a class without members stores zeros, so that nothing need be cleared.
It adds differences x_i - c_k, not members and weights apart: near convergence dl c_k and sum dl x_i are large
and equal. Sorting M labels is little beside M D numbers, and needs no gradient.

op: center_loss
schedule: segment_gather, same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def center_loss_kernel(
    x_ptr, label_ptr, c_ptr, loss_ptr, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    label = tl.load(label_ptr + rows, mask=rows < M, other=0)
    square = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        away = load_tile(x_ptr, rows, rows < M, d, D) - load_tile(c_ptr, label, rows < M, d, D)
        square += away * away
    tl.store(loss_ptr + rows, 0.5 * tl.sum(square, axis=1), mask=rows < M)


@autodiff(inputs_require_grad=(0, 1))
def center_loss(x, centers, labels):
    """x: (M, D); centers: (C, D); labels: int64 (M); gives (M) in float32."""
    x, centers, labels = x.contiguous(), centers.contiguous(), labels.contiguous()
    M, D = x.shape
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    center_loss_kernel[(triton.cdiv(M, 16),)](x, labels, centers, loss, M, D, BLOCK_M=16, BLOCK_D=128)
    return loss


def reference(x, centers, labels):
    return 0.5 * (x - centers[labels]).pow(2).sum(-1)


SWEEP = [{"M": 65536, "D": 512, "C": 10000}, {"M": 100003, "D": 130, "C": 1000}]
SWEEP_CPU = [{"M": 43, "D": 20, "C": 9}, {"M": 130, "D": 140, "C": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, C = dims["M"], dims["D"], dims["C"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    return x, torch.randn(C, D, device=device, dtype=dtype), torch.randint(0, C, (M,), device=device)


# ---- backward ----


@triton.jit
def dx_kernel(
    x_ptr, label_ptr, c_ptr, dloss_ptr, dx_ptr, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    label = tl.load(label_ptr + rows, mask=rows < M, other=0)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    away = load_tile(x_ptr, rows, rows < M, d, D) - load_tile(c_ptr, label, rows < M, d, D)
    mask = (rows[:, None] < M) & (d[None, :] < D)
    offs = rows[:, None] * D + d[None, :]
    tl.store(dx_ptr + offs, (dloss[:, None] * away).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dc_kernel(
    x_ptr, order_ptr, offsets_ptr, c_ptr, dloss_ptr, dc_ptr, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.load(c_ptr + k * D + d, mask=d < D, other=0.0).to(tl.float32)
    end = tl.load(offsets_ptr + k + 1)
    dc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + k), end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        rows = tl.load(order_ptr + i, mask=i < end, other=0)
        dloss = tl.load(dloss_ptr + rows, mask=i < end, other=0.0)
        dc += dloss[:, None] * (c[None, :] - load_tile(x_ptr, rows, i < end, d, D))
    tl.store(dc_ptr + k * D + d, tl.sum(dc, axis=0).to(dc_ptr.dtype.element_ty), mask=d < D)


class CenterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, centers, labels):
        x, centers, labels = x.contiguous(), centers.contiguous(), labels.contiguous()
        ctx.save_for_backward(x, centers, labels)
        return center_loss(x, centers, labels)

    @staticmethod
    def backward(ctx, dloss):
        x, centers, labels = ctx.saved_tensors
        (M, D), C = x.shape, centers.shape[0]
        dloss, chunks = dloss.contiguous(), triton.cdiv(D, 128)
        dx = dc = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, 16), chunks)](
                x, labels, centers, dloss, dx, M, D, BLOCK_M=16, BLOCK_D=128
            )
        if ctx.needs_input_grad[1]:
            dc = torch.empty_like(centers)
            by_class, order = torch.sort(labels)
            offsets = torch.searchsorted(by_class, torch.arange(C + 1, device=x.device))
            dc_kernel[(C, chunks)](x, order, offsets, centers, dloss, dc, D, BLOCK_M=16, BLOCK_D=128)
        return dx, dc, None


def center_loss_autograd(x, centers, labels):
    return CenterLoss.apply(x, centers, labels)
