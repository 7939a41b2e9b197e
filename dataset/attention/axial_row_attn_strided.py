"""Axial attention: each row of a map, or each column, attends within itself.

Forward    a line of L positions along the axis, a head:  P = softmax(s Q K^T),  O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(P * dP)),  dQ = s dS K,  dK = s dS^T Q

Forward schedule: the map is (batch, Y, X, heads, dim) and stays so. A line's positions lie a stride apart: H
D along a row, X H D along a column; where a line begins follows from its number. So one kernel serves both
axes, with two strides for a transposition of three tensors before and of one after. A line is short and fits
one tile, L up to 128: a program owns (line, head), without loops, and saves nothing.
Backward schedule: lines do not meet, so the line's owner has everything that its gradients need: it rebuilds
P from its scores in one dot and a row softmax, reads dO, and stores dQ, dK and dV with the forward's strides.
Five dots, each operand read once, each gradient written once. rowsum(P * dP) takes the place of <dO, O>, as
both are in registers and O would have to be read.

op: axial_attention
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_line(ptr, n, d, L, D, stride):
    mask = (n[:, None] < L) & (d[None, :] < D)
    return tl.load(ptr + n[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_line(ptr, value, n, d, L, D, stride):
    mask = (n[:, None] < L) & (d[None, :] < D)
    tl.store(ptr + n[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def line_begin(inner, D, outer_stride, inner_stride):
    """Where line and head of the program begin: lines are numbered by an outer and an inner index."""
    line = tl.program_id(0).to(tl.int64)
    return line // inner * outer_stride + line % inner * inner_stride + tl.program_id(1) * D


@triton.jit
def line_weights(q, k, n, L, scale, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    s = tl.where(n[None, :] < L, s, -float("inf"))
    e = tl.exp(s - tl.max(s, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def axial_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, L, D, inner, stride, outer_stride, inner_stride, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    at = line_begin(inner, D, outer_stride, inner_stride)
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_line(q_ptr + at, n, d, L, D, stride)
    k = load_line(k_ptr + at, n, d, L, D, stride)
    v = load_line(v_ptr + at, n, d, L, D, stride)
    p = line_weights(q, k, n, L, scale, PRECISION)
    store_line(o_ptr + at, tl.dot(p.to(v.dtype), v, input_precision=PRECISION), n, d, L, D, stride)


def lines(q, columns):
    """Grid, sizes and strides, tiles."""
    B, Y, X, H, D = q.shape
    # a row begins at (b Y + y) X H D; a column at b Y X H D + x H D
    L, number, inner, stride, outer_stride, inner_stride = (
        (Y, B * X, X, X * H * D, Y * X * H * D, H * D)
        if columns
        else (X, B * Y, Y, H * D, Y * X * H * D, X * H * D)
    )
    if L > 128 or D > 128:
        raise ValueError(f"a line of {L} x {D} does not fit one tile")
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in (L, D))
    sizes = (L, D, max(1, inner), stride, outer_stride, inner_stride, D**-0.5)
    tiles = {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D}
    tiles["num_warps"] = 8 if q.element_size() > 2 else 4  # exact products hold their tiles in registers
    return (number, H), sizes, tiles


@autodiff(inputs_require_grad=(0, 1, 2))
def axial_attention(q, k, v, columns=False):
    """q, k, v: (batch, Y, X, heads, dim), along X, or along Y for columns."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, (grid, sizes, tiles) = torch.empty_like(q), lines(q, columns)
    axial_kernel[grid](q, k, v, o, *sizes, **tiles)
    return o


def reference(q, k, v, columns=False):
    order = (0, 2, 3, 1, 4) if columns else (0, 1, 3, 2, 4)  # (batch, line, head, position, dim)
    q, k, v = (x.permute(order) for x in (q, k, v))
    o = torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v
    return o.permute((0, 3, 1, 2, 4) if columns else (0, 1, 3, 2, 4))


SWEEP = [
    {"B": 8, "Y": 128, "X": 128, "H": 8, "D": 32, "columns": 1},
    {"B": 4, "Y": 97, "X": 61, "H": 6, "D": 48, "columns": 0},
]
SWEEP_CPU = [
    {"B": 1, "Y": 6, "X": 19, "H": 2, "D": 8, "columns": 0},
    {"B": 2, "Y": 17, "X": 3, "H": 1, "D": 20, "columns": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = tuple(dims[key] for key in ("B", "Y", "X", "H", "D"))
    qkv = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return qkv, {"columns": dims["columns"] % 2 == 1}


# ---- backward ----


@triton.jit
def axial_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr,
    L, D, inner, stride, outer_stride, inner_stride, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    at = line_begin(inner, D, outer_stride, inner_stride)
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_line(q_ptr + at, n, d, L, D, stride)
    k = load_line(k_ptr + at, n, d, L, D, stride)
    v = load_line(v_ptr + at, n, d, L, D, stride)
    do = load_line(do_ptr + at, n, d, L, D, stride)
    p = line_weights(q, k, n, L, scale, PRECISION)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
    store_line(dv_ptr + at, dv, n, d, L, D, stride)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scale).to(q.dtype)
    store_line(dq_ptr + at, tl.dot(ds, k, input_precision=PRECISION), n, d, L, D, stride)
    store_line(dk_ptr + at, tl.dot(tl.trans(ds), q, input_precision=PRECISION), n, d, L, D, stride)


class AxialAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, columns):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v)
        ctx.columns = columns
        return axial_attention(q, k, v, columns)

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        grid, sizes, tiles = lines(q, ctx.columns)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        axial_backward_kernel[grid](q, k, v, do.contiguous(), *grads, *sizes, **tiles)
        needs = ctx.needs_input_grad
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=False)), None


def axial_attention_autograd(q, k, v, columns=False):
    return AxialAttention.apply(q, k, v, columns)
