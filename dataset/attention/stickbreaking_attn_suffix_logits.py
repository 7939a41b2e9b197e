"""Stick-breaking attention: a query breaks pieces off a stick of length 1, from its own key leftwards.

Forward    Z = s Q K^T,  A_ij = sigmoid(z_ij) prod_{j < l <= i} (1 - sigmoid(z_il)) for j <= i,  O = A V.
           With sp(z) = log(1 + exp(z)):  1 - sigmoid(z) = exp(-sp(z)),  sigmoid(z) = exp(z - sp(z)), so
           A_ij = exp(z_ij - R_ij),  R_ij = sum_{j <= l <= i} sp(z_il)
Backward   dV = A^T dO,  W_ij = A_ij <dO_i, V_j>.  z_ij is in its own exponent once with a plus, and through
           sp, whose derivative is sigmoid, in R_il of every l <= j with a minus:
           dz_ij = W_ij - sigmoid(z_ij) U_ij,  U_ij = sum_{l <= j} W_il,   dQ = s dZ K,  dK = s dZ^T Q

Forward schedule: a query tile's owner walks the keys from the diagonal to the left with the suffix sum R of
its rows; there is no maximum, as A is at most 1. Before each step it stores R as it stands: one number a row
and key tile, N / BLOCK a row, as much as O where N is BLOCK D, and less before.
Backward schedule: R runs from the right, U from the left. R of any tile follows from the stored carry and a
scan within the tile, so nobody has to walk in the forward's order again. The query tile's owner walks to the
right with the prefix sum U, makes dQ, and stores its carries in the same way. With both carries a tile of dZ
depends on no other tile: the owner of a key tile walks the queries in any order and keeps dK and dV in
registers. Without carries they would have to be added by atomics from the query's side. Neither R nor U is
taken as a difference from a row's total: that would cancel exactly where the stick is nearly used up.

op: stickbreaking_attention
schedule: swap_owner, reverse_scan, recompute_from_stats
difficulty: 5
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
def softplus(z):
    n = tl.where(z > 0, -z, z)
    return tl.where(z > 0, z, 0.0) + tl.log(1 + tl.exp(n))


@triton.jit
def rebuild_a(z, seen, carry):
    """A of one tile, and R at its first column, with R as it stands right of the tile."""
    sp = tl.where(seen, softplus(z), 0.0)
    R = carry[:, None] + tl.cumsum(sp, axis=1, reverse=True)
    a = tl.exp(tl.where(seen, z - R, -float("inf")))
    return a, carry + tl.sum(sp, axis=1)


@triton.jit
def stickbreaking_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, r_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, T = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for step in range(i + 1):
        j = i - step
        cols = j * BLOCK + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        tl.store(r_ptr + head * T + j * N + rows, carry, mask=rows < N)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        a, carry = rebuild_a(z, cols[None, :] <= rows[:, None], carry)
        acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)
    store_tile(o_ptr + head * D, acc, rows, d, N, D)


def stickbreaking_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    T = triton.cdiv(N, tiles["BLOCK"])
    r = torch.empty((B, H, T, N), device=q.device, dtype=torch.float32)  # key tiles right of the row: unused
    stickbreaking_kernel[(T, B * H)](q, k, v, o, r, N, D, D**-0.5, **tiles)
    return o, r


@autodiff(inputs_require_grad=(0, 1, 2))
def stickbreaking_attention(q, k, v):
    """q, k, v: (batch, heads, tokens, dim)."""
    return stickbreaking_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    z = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)
    seen = torch.ones_like(z, dtype=torch.bool).tril()
    sp = torch.nn.functional.softplus(z) * seen
    R = sp.flip(-1).cumsum(-1).flip(-1)
    return torch.exp((z - R).masked_fill(~seen, -float("inf"))) @ v


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 12, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 70, "D": 16}, {"B": 2, "H": 1, "N": 34, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def rebuild_a_w(q, k, v, do, seen, r, scale, PRECISION: tl.constexpr):
    """A, W and sigmoid(z) of one tile, rows of queries by columns of keys."""
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    a, _ = rebuild_a(z, seen, r)
    return a, a * tl.dot(do, tl.trans(v), input_precision=PRECISION), tl.where(seen, tl.sigmoid(z), 0.0)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, r_ptr, do_ptr, u_ptr, dq_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, T = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for j in range(i + 1):
        cols = j * BLOCK + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        place = head * T + j * N + rows
        tl.store(u_ptr + place, carry, mask=rows < N)
        r = tl.load(r_ptr + place, mask=rows < N, other=0.0)
        _, w, g = rebuild_a_w(q, k, v, do, cols[None, :] <= rows[:, None], r, scale, PRECISION)
        dz = w - g * (carry[:, None] + tl.cumsum(w, axis=1))
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
        carry += tl.sum(w, axis=1)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, r_ptr, do_ptr, u_ptr, dk_ptr, dv_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j, T = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64) * N
    cols, d = j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(j * BLOCK, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        place = head * T + j * N + rows
        r = tl.load(r_ptr + place, mask=rows < N, other=0.0)
        u = tl.load(u_ptr + place, mask=rows < N, other=0.0)
        seen = (cols[None, :] <= rows[:, None]) & (rows[:, None] < N)
        a, w, g = rebuild_a_w(q, k, v, do, seen, r, scale, PRECISION)
        dz = w - g * (u[:, None] + tl.cumsum(w, axis=1))
        dv = tl.dot(tl.trans(a.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class StickbreakingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, r = stickbreaking_forward(q, k, v)
        ctx.save_for_backward(q, k, v, r)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, r = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
        dq, u = torch.empty_like(q), torch.empty_like(r)
        query_kernel[grid](q, k, v, r, do, u, dq, N, D, D**-0.5, **tiles)
        dk = dv = None
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, r, do, u, dk, dv, N, D, D**-0.5, **tiles)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None


def stickbreaking_attention_autograd(q, k, v):
    return StickbreakingAttention.apply(q, k, v)
