"""Causal attention by squared ReLU, divided by the number of keys that a query sees.

Forward    Z = s Q K^T,  A_ij = relu(Z_ij)^2 / (i + 1) for j <= i,  O = A V
Backward   with dP = dO V^T:  dZ_ij = 2 relu(Z_ij) dP_ij / (i + 1) for j <= i,
           dV = A^T dO,  dQ = s dZ K,  dK = s dZ^T Q

Forward schedule: a program owns a query tile and walks the keys up to the diagonal. Without a normaliser over
the row there is no maximum, no total and no rescaling; the division by i + 1 is one a row, at the end.
Backward schedule: the division belongs to the row, so it is made of dO where dO is loaded: with dO' = dO / (i
+ 1), dV = relu(Z)^2^T dO' and dZ = 2 relu(Z) (dO' V^T), and no tile is divided. r = relu(Z) serves both, its
square as the weight and its double as the slope: the derivative of the square is 0 at 0, from either side, so
the kink of the relu is none. Key tiles own dK and dV, query tiles own dQ; nothing is saved but the inputs, no
statistics, not O, and no prologue goes before.

op: relu2_attention
schedule: swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def positive(q, k, rows, cols, scale, PRECISION: tl.constexpr):
    """relu(Z) of one tile, 0 for keys that come after the query."""
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return tl.where((z > 0.0) & (cols[None, :] <= rows[:, None]), z, 0.0)


@triton.jit
def relu2_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        r = positive(q, k, rows, cols, scale, PRECISION)
        acc = tl.dot((r * r).to(v.dtype), v, acc, input_precision=PRECISION)
    store_tile(o_ptr + head * D, acc / (rows + 1)[:, None], rows, d, N, D)


@autodiff(inputs_require_grad=(0, 1, 2))
def relu2_attention(q, k, v):
    """q, k, v: (batch, heads, tokens, dim)."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    q, k, v, (B, H, N, D) = q.contiguous(), k.contiguous(), v.contiguous(), q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    relu2_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](q, k, v, o, N, D, D**-0.5, **tiles)
    return o


def reference(q, k, v):
    z = torch.relu(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)).tril()
    return z.pow(2) / torch.arange(1, q.shape[2] + 1, device=q.device)[:, None] @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 55, "D": 16}, {"B": 2, "H": 1, "N": 34, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def load_do(do_ptr, rows, d, N, D):
    do = load_tile(do_ptr, rows, d, N, D)
    return (do.to(tl.float32) / (rows + 1)[:, None]).to(do.dtype)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_do(do_ptr + head * D, rows, d, N, D)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        r = positive(q, k, rows, cols, scale, PRECISION)
        dz = 2.0 * r * tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(first, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_do(do_ptr + head * D, rows, d, N, D)
        r = positive(q, k, rows, cols, scale, PRECISION)
        dv = tl.dot(tl.trans((r * r).to(do.dtype)), do, dv, input_precision=PRECISION)
        dz = 2.0 * r * tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class ReLU2Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v)
        return relu2_attention(q, k, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), tiles = q.shape, tiling(q)
        grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](q, k, v, do, dq, N, D, D**-0.5, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, do, dk, dv, N, D, D**-0.5, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def relu2_attention_autograd(q, k, v):
    return ReLU2Attention.apply(q, k, v)
