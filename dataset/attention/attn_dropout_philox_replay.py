"""Attention with dropout on its weights, whose mask exists in registers alone.

Forward    P = softmax(s Q K^T),  A_ij = P_ij m_ij / (1 - p),  O = A V;  m_ij = [r_ij >= p], where r_ij is
           number i N + j of the Philox stream that belongs to the seed and the head
Backward   dV = A^T dO,  dP_ij = <dO_i, V_j> m_ij / (1 - p),  dS = P * (dP - delta).
           delta_i = sum_j P_ij dP_ij = sum_j A_ij <dO_i, V_j> = <dO_i, O_i>: the mask is in O already
           dQ = s dS K,  dK = s dS^T Q

Forward schedule: a program owns a tile of queries and walks the keys with an online softmax. The total is the
sum before dropout; only what meets V is masked. lse is saved, in units of log2, and O in float32: where one
key has nearly all of P, dS is a difference of nearly equal numbers, and a delta of rounded O would be all of
it. No mask is saved.
Backward schedule: the generator is counter-based: a number is a function of (i, j), not of who asks or when.
So tiles may be walked in another order, or be transposed. The key tile's owner uses that: it builds S^T, keys
by queries, whose products with dO and Q are dots without a transposition in between, and draws the mask of
the transposed tile from the same counters. The query tile's owner draws it once more for dQ. A stored mask
would be N^2 bytes a head, written once and read twice.

op: dropout_attention
schedule: swap_owner, recompute_from_stats, index_or_seed_replay
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


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
def keeps(seed, head, i, j, N, p):
    return tl.rand(seed + head, i * N + j) >= p


@triton.jit
def dropout_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, exact_ptr, lse_ptr, N, D, scale_log2, p, seed,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        e = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(e, axis=1)
        kept = tl.where(keeps(seed, tl.program_id(1), rows[:, None], cols[None, :], N, p), e, 0.0)
        acc = tl.dot(kept.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    o = acc / (total * (1 - p))[:, None]
    store_tile(o_ptr + head * D, o, rows, d, N, D)
    store_tile(exact_ptr + head * D, o, rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


@triton.jit
def mask_kernel(mask_ptr, N, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = keeps(seed, tl.program_id(2), i, j, N, p).to(tl.int8)
    tl.store(mask_ptr + (tl.program_id(2).to(tl.int64) * N + i) * N + j, mask, mask=j < N)


def dropout_attention_forward(q, k, v, p, seed):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    if D > 128 or N > 32768:
        raise ValueError(f"{N} tokens of dimension {D}: a head of up to 32768 x 128 has counters of 32 bits")
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    o, exact, tiles = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    dropout_attention_kernel[grid](q, k, v, o, exact, lse, N, D, D**-0.5 * LOG2E, p, seed, **tiles)
    return o, exact, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def dropout_attention(q, k, v, p, seed):
    """q, k, v: (batch, heads, tokens, dim); heads of a batch have the seeds seed, seed + 1, and so on."""
    return dropout_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), p, seed)[0]


def reference(q, k, v, p, seed):
    B, H, N, D = q.shape
    mask = torch.empty((B, H, N, N), device=q.device, dtype=torch.int8)
    mask_kernel[(N, triton.cdiv(N, 64), B * H)](mask, N, p, seed, BLOCK=64)
    return (torch.softmax(D**-0.5 * q @ k.transpose(-1, -2), dim=-1) * mask / (1 - p)) @ v


SWEEP = [{"B": 4, "H": 12, "N": 1024, "D": 64}, {"B": 2, "H": 8, "N": 777, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 47, "D": 16}, {"B": 2, "H": 1, "N": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    qkv = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return qkv, {"p": 0.1, "seed": 77}


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, scale, scale_log2, p, seed,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        weight = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
        da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = keeps(seed, tl.program_id(1), rows[:, None], cols[None, :], N, p)
        ds = weight * (tl.where(kept, da / (1 - p), 0.0) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, scale, scale_log2, p, seed,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2  # keys by queries
        weight = tl.exp2(s - lse[None, :])
        kept = keeps(seed, tl.program_id(1), rows[None, :], cols[:, None], N, p)
        a = tl.where(kept, weight / (1 - p), 0.0)
        dv = tl.dot(a.to(do.dtype), do, dv, input_precision=PRECISION)
        da = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = weight * (tl.where(kept, da / (1 - p), 0.0) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class DropoutAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, p, seed):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, exact, lse = dropout_attention_forward(q, k, v, p, seed)
        ctx.save_for_backward(q, k, v, exact, lse)
        ctx.p, ctx.seed = p, seed
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, do, lse, delta)
        scalars = (N, D, D**-0.5, D**-0.5 * LOG2E, ctx.p, ctx.seed)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](*seen, dq, *scalars, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](*seen, dk, dv, *scalars, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None, None, None


def dropout_attention_autograd(q, k, v, p, seed):
    return DropoutAttention.apply(q, k, v, p, seed)
