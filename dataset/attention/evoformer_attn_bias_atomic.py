"""Attention along rows with a pair bias that all rows share, whose gradient is added by atomics.

Forward    S_r = s Q_r K_r^T + B,  P_r = softmax(S_r),  O_r = P_r V_r   (row r of R, a head; B is (H, N, N))
Backward   dV_r = P_r^T dO_r,  dS_r = P_r * (dO_r V_r^T - delta_r),  delta_ri = <dO_ri, O_ri>,
           dQ_r = s dS_r K_r,  dK_r = s dS_r^T Q_r,  dB = sum_r dS_r

Forward schedule: a program owns (row, head, tile of queries) and walks the keys with an online softmax,
adding the bias tile of each step. lse is saved, in units of log2.
Backward schedule: the owner of a key tile of a row has each dS_r of its columns once, for dK and dV, and adds
it to dB as it comes; a second kernel makes dQ. A third ownership, by tiles of B, would rebuild every score
once more; here dB costs no dot, but R additions in fp32 on each of its H N^2 addresses, in L2, in an order
that changes from run to run. That is the better bargain while R is small, or dots are dear. All rows start at
once, and would all add to the same tile of B, then all to the next: so row r begins its walk over the queries
at tile r modulo T and goes round, and at any time the rows are spread over the tiles. In short types the sum
is rounded once, by a last kernel.

op: pair_bias_attention
schedule: swap_owner, atomic_accumulate, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


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
def scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2, -inf beyond the last key."""
    bias = load_tile(bias_ptr, rows, cols, N, N).to(tl.float32)
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias) * LOG2E
    return tl.where(cols[None, :] < N, s, -float("inf"))


@triton.jit
def pair_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr, lse_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * N * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + base * D, cols, d, N, D)
        v = load_tile(v_ptr + base * D, cols, d, N, D)
        s = scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + base * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + base + rows, m + tl.log2(total), mask=rows < N)


def pair_bias_forward(q, k, v, bias):
    R, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or bias.shape != (H, N, N):
        raise ValueError("q, k and v must have one shape, and bias a number a head and pair")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, tiles = torch.empty_like(q), tiling(q)
    lse = torch.empty((R, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), R * H)
    pair_bias_kernel[grid](q, k, v, bias, o, lse, H, N, D, D**-0.5, **tiles)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def pair_bias_attention(q, k, v, bias):
    """q, k, v: (R, heads, N, dim); bias: (heads, N, N), the same for all R rows."""
    return pair_bias_forward(q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous())[0]


def reference(q, k, v, bias):
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + bias, dim=-1) @ v


SWEEP = [{"R": 64, "H": 8, "N": 256, "D": 32}, {"R": 19, "H": 4, "N": 383, "D": 64}]
SWEEP_CPU = [{"R": 3, "H": 2, "N": 34, "D": 16}, {"R": 2, "H": 1, "N": 40, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    R, H, N, D = (dims[key] for key in ("R", "H", "N", "D"))
    q, k, v = (torch.randn(R, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(H, N, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    p = tl.exp2(scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * N * N
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, N, D)
    do = load_tile(do_ptr + base * D, rows, d, N, D)
    lse = tl.load(lse_ptr + base + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + base + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + base * D, cols, d, N, D)
        v = load_tile(v_ptr + base * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + base * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, sum_ptr, H, N, D, scale,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r, h, T = tl.program_id(1) // H, tl.program_id(1) % H, tl.num_programs(0)
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += h.to(tl.int64) * N * N
    sum_ptr += h.to(tl.int64) * N * N
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + base * D, cols, d, N, D)
    v = load_tile(v_ptr + base * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for step in range(T):
        rows = (step + r) % T * BLOCK + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + base * D, rows, d, N, D)
        do = load_tile(do_ptr + base * D, rows, d, N, D)
        lse = tl.load(lse_ptr + base + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + base + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, bias_ptr, rows, cols, N, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
        if BIAS:
            mask = (rows[:, None] < N) & (cols[None, :] < N)
            tl.atomic_add(sum_ptr + rows[:, None] * N + cols[None, :], ds, mask=mask, sem="relaxed")
    store_tile(dk_ptr + base * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + base * D, dv, cols, d, N, D)


@triton.jit
def round_kernel(sum_ptr, dbias_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sum_ptr + offs, mask=offs < n_elements, other=0.0)
    tl.store(dbias_ptr + offs, total.to(dbias_ptr.dtype.element_ty), mask=offs < n_elements)


class PairBiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous()
        o, lse = pair_bias_forward(q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, bias, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (R, H, N, D), tiles = q.shape, tiling(q)
        grid = (triton.cdiv(N, tiles["BLOCK"]), R * H)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(R * H * N, 32),)](
            o, do, delta, R * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        dbias = total = torch.zeros(bias.shape if needs[3] else (0,), device=q.device, dtype=torch.float32)
        seen, sizes = (q, k, v, bias, do, lse, delta), (H, N, D, D**-0.5)
        if needs[0]:
            query_kernel[grid](*seen, grads[0], *sizes, **tiles)
        if needs[1] or needs[2] or needs[3]:
            key_kernel[grid](*seen, grads[1], grads[2], total, *sizes, BIAS=needs[3], **tiles)
        if needs[3] and bias.dtype != torch.float32:
            dbias = torch.empty_like(bias)
            round_kernel[(triton.cdiv(bias.numel(), 1024),)](total, dbias, bias.numel(), BLOCK=1024)
        return tuple(grad if needed else None for grad, needed in zip((*grads, dbias), needs, strict=True))


def pair_bias_attention_autograd(q, k, v, bias):
    return PairBiasAttention.apply(q, k, v, bias)
