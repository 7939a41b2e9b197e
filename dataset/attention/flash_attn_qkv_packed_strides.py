"""Attention on a packed projection: q, k and v are slices of one tensor, and so are their gradients.

Forward    x is (batch, tokens, 3, heads, dim):  Q, K, V = x[:, :, 0], x[:, :, 1], x[:, :, 2],
           P = softmax(s Q K^T) for each head,  O = P V, as (batch, tokens, heads, dim)
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,
           dx[:, :, 0] = s dS K,   dx[:, :, 1] = s dS^T Q,   dx[:, :, 2] = P^T dO

Forward schedule: what a linear layer gives is read where it lies. A head's slice is a base address and a
stride of 3 H D from token to token; rows are D numbers long and contiguous, which is all that a load needs.
Chunks and transposes in front would copy three tensors. O is written in the order in which the next linear
layer reads it. lse is saved, in units of log2.
Backward schedule: dx is one tensor and is allocated once, uninitialised. Key tiles own their rows of the two
slices dK and dV, query tiles theirs of dQ: slices do not overlap, so both kernels write into the same tensor
without a sum, an atomic or a concatenation, and every element has one writer. Three separate gradients would
be written, and then copied into the packed one.

op: qkv_packed_attention
schedule: swap_owner, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if x.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(x.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, d, N, D, stride):
    mask = (rows[:, None] < N) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, N, D, stride):
    mask = (rows[:, None] < N) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * stride + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def head_of(H, N, D):
    """The program's batch entry and head; where its slices of x and of o begin."""
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    return (b * N * 3 * H + h) * D, (b * N * H + h) * D


@triton.jit
def packed_attention_kernel(
    x_ptr, o_ptr, lse_ptr, H, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    x_at, o_at = head_of(H, N, D)
    q_ptr = x_ptr + x_at
    k_ptr, v_ptr = q_ptr + H * D, q_ptr + 2 * H * D
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr, rows, d, N, D, 3 * H * D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, N, D, 3 * H * D)
        v = load_tile(v_ptr, cols, d, N, D, 3 * H * D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + o_at, acc / total[:, None], rows, d, N, D, H * D)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * N + rows, m + tl.log2(total), mask=rows < N)


def packed_attention_forward(x):
    B, N, three, H, D = x.shape
    if three != 3 or D > 128:
        raise ValueError(f"{three} slices are not q, k and v, or a head of {D} does not fit one tile")
    o, tiles = x.new_empty((B, N, H, D)), tiling(x)
    lse = torch.empty((B, H, N), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    packed_attention_kernel[grid](x, o, lse, H, N, D, D**-0.5 * LOG2E, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0,))
def qkv_packed_attention(x):
    """x: (batch, tokens, 3, heads, dim); gives (batch, tokens, heads, dim)."""
    return packed_attention_forward(x.contiguous())[0]


def reference(x):
    q, k, v = x.permute(2, 0, 3, 1, 4)
    return (torch.softmax(x.shape[-1] ** -0.5 * q @ k.transpose(-1, -2), dim=-1) @ v).transpose(1, 2)


SWEEP = [{"B": 32, "N": 577, "H": 12, "D": 64}, {"B": 2, "N": 1531, "H": 8, "D": 128}]
SWEEP_CPU = [{"B": 2, "N": 34, "H": 2, "D": 16}, {"B": 1, "N": 40, "H": 3, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N, H, D = (dims[key] for key in ("B", "N", "H", "D"))
    return (torch.randn(B, N, 3, H, D, device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, H, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    _, o_at = head_of(H, N, D)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + o_at, rows, d, N, D, H * D).to(tl.float32)
    do = load_tile(do_ptr + o_at, rows, d, N, D, H * D).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    tl.store(delta_ptr + tl.program_id(1).to(tl.int64) * N + rows, delta, mask=rows < N)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    x_ptr, do_ptr, lse_ptr, delta_ptr, dx_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    x_at, o_at = head_of(H, N, D)
    q_ptr = x_ptr + x_at
    k_ptr, v_ptr = q_ptr + H * D, q_ptr + 2 * H * D
    row_at = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr, rows, d, N, D, 3 * H * D)
    do = load_tile(do_ptr + o_at, rows, d, N, D, H * D)
    lse = tl.load(lse_ptr + row_at + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + row_at + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr, cols, d, N, D, 3 * H * D)
        v = load_tile(v_ptr, cols, d, N, D, 3 * H * D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dx_ptr + x_at, dq * scale, rows, d, N, D, 3 * H * D)


@triton.jit
def key_kernel(
    x_ptr, do_ptr, lse_ptr, delta_ptr, dx_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    x_at, o_at = head_of(H, N, D)
    q_ptr = x_ptr + x_at
    k_ptr, v_ptr = q_ptr + H * D, q_ptr + 2 * H * D
    row_at = tl.program_id(1).to(tl.int64) * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr, cols, d, N, D, 3 * H * D)
    v = load_tile(v_ptr, cols, d, N, D, 3 * H * D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr, rows, d, N, D, 3 * H * D)
        do = load_tile(do_ptr + o_at, rows, d, N, D, H * D)
        lse = tl.load(lse_ptr + row_at + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + row_at + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dx_ptr + x_at + H * D, dk * scale, cols, d, N, D, 3 * H * D)
    store_tile(dx_ptr + x_at + 2 * H * D, dv, cols, d, N, D, 3 * H * D)


class QKVPackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        o, lse = packed_attention_forward(x)
        ctx.save_for_backward(x, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        x, o, lse = ctx.saved_tensors
        do, tiles, (B, N, _, H, D) = do.contiguous(), tiling(x), x.shape
        grid, sizes = (triton.cdiv(N, tiles["BLOCK"]), B * H), (H, N, D, D**-0.5, D**-0.5 * LOG2E)
        dx, delta = torch.empty_like(x), torch.empty_like(lse)
        delta_kernel[grid](o, do, delta, H, N, D, BLOCK=tiles["BLOCK"], BLOCK_D=tiles["BLOCK_D"])
        query_kernel[grid](x, do, lse, delta, dx, *sizes, **tiles)
        key_kernel[grid](x, do, lse, delta, dx, *sizes, **tiles)
        return dx


def qkv_packed_attention_autograd(x):
    return QKVPackedAttention.apply(x)
