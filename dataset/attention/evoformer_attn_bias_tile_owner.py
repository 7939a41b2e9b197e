"""Attention along rows with a pair bias that all rows share.

Forward    S_r = s Q_r K_r^T + B,  P_r = softmax(S_r),  O_r = P_r V_r   (row r of R, a head; B is (H, N, N))
Backward   dV_r = P_r^T dO_r,  dP_r = dO_r V_r^T,  dS_r = P_r * (dP_r - delta_r),  delta_ri = <dO_ri, O_ri>,
           dQ_r = s dS_r K_r,  dK_r = s dS_r^T Q_r,  dB = sum_r dS_r

Forward schedule: a program owns (row, head, tile of queries) and walks the keys with an online softmax,
adding the bias tile of each step. It saves lse, in units of log2.
Backward schedule: three ownerships, one for each way a tensor is shared. dQ: a query tile walks the keys. dK
and dV: a key tile walks the queries. dB is read by all R rows at every (i, j): its (i, j) tile walks the
rows, rebuilds P and dS of each, and adds them in registers. That is one more recompute of the scores, two
dots a tile and row; the alternatives are R atomic additions on each of H N^2 addresses, or R bias gradients
in memory, R times what is wanted. Each gradient is stored once and the order of every sum is fixed.

op: pair_bias_attention
schedule: swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


def tiling(q):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def biased_scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2."""
    bias = load_tile(bias_ptr, rows, cols, N, N).to(tl.float32)
    return (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias) * LOG2E


@triton.jit
def pair_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr, lse_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * N * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, N, D)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + base * D, cols, d, N, D)
        v = load_tile(v_ptr + base * D, cols, d, N, D)
        s = biased_scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION)
        s = tl.where(cols[None, :] < N, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + base * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + base + rows, m + tl.log2(total), mask=rows < N)


def pair_bias_forward(q, k, v, bias):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    R, H, N, D = q.shape
    if bias.shape != (H, N, N):
        raise ValueError(f"a bias of {tuple(bias.shape)} for {H} heads and {N} tokens")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((R, H, N), device=q.device, dtype=torch.float32)
    pair_bias_kernel[(triton.cdiv(N, 64), R * H)](q, k, v, bias, o, lse, H, N, D, D**-0.5, **tiling(q))
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def pair_bias_attention(q, k, v, bias):
    """q, k, v: (R, H, N, D); bias: (H, N, N), the same for all R rows."""
    return pair_bias_forward(q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous())[0]


def reference(q, k, v, bias):
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + bias, dim=-1) @ v


SWEEP = [{"R": 128, "H": 8, "N": 256, "D": 32}, {"R": 37, "H": 4, "N": 383, "D": 32}]
SWEEP_CPU = [{"R": 5, "H": 2, "N": 35, "D": 16}, {"R": 2, "H": 1, "N": 70, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    R, H, N, D = dims["R"], dims["H"], dims["N"], dims["D"]
    q, k, v = (torch.randn(R, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(H, N, N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, ROWS, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, ROWS, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, ROWS, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < ROWS)


@triton.jit
def rebuild_p_ds(q, k, v, do, bias_ptr, lse_ptr, delta_ptr, rows, cols, N, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, 0 outside the matrix."""
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=rows < N, other=0.0)
    s = biased_scores(q, k, bias_ptr, rows, cols, N, scale, PRECISION)
    inside = (rows[:, None] < N) & (cols[None, :] < N)
    p = tl.where(inside, tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * N * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, N, D)
    do = load_tile(do_ptr + base * D, rows, d, N, D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + base * D, cols, d, N, D)
        v = load_tile(v_ptr + base * D, cols, d, N, D)
        _, ds = rebuild_p_ds(
            q, k, v, do, bias_ptr, lse_ptr + base, delta_ptr + base, rows, cols, N, scale, PRECISION
        )
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + base * D, dq * scale, rows, d, N, D)


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * N
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * N * N
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + base * D, cols, d, N, D)
    v = load_tile(v_ptr + base * D, cols, d, N, D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + base * D, rows, d, N, D)
        do = load_tile(do_ptr + base * D, rows, d, N, D)
        p, ds = rebuild_p_ds(
            q, k, v, do, bias_ptr, lse_ptr + base, delta_ptr + base, rows, cols, N, scale, PRECISION
        )
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + base * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + base * D, dv, cols, d, N, D)


@triton.jit
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, do_ptr, lse_ptr, delta_ptr, dbias_ptr, R, H, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    bias_ptr += h * N * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for r in range(R):
        base = (r * H + h) * N
        q = load_tile(q_ptr + base * D, rows, d, N, D)
        do = load_tile(do_ptr + base * D, rows, d, N, D)
        k = load_tile(k_ptr + base * D, cols, d, N, D)
        v = load_tile(v_ptr + base * D, cols, d, N, D)
        _, ds = rebuild_p_ds(
            q, k, v, do, bias_ptr, lse_ptr + base, delta_ptr + base, rows, cols, N, scale, PRECISION
        )
        acc += ds
    store_tile(dbias_ptr + h * N * N, acc, rows, cols, N, N)


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
        do = do.contiguous()
        R, H, N, D = q.shape
        needs, scale = ctx.needs_input_grad, D**-0.5
        blocks = tiling(q)
        q_tiles, k_tiles = triton.cdiv(N, 64), triton.cdiv(N, 32)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(R * H * N, 64),)](
            o, do, delta, R * H * N, D, BLOCK_M=64, BLOCK_D=blocks["BLOCK_D"]
        )
        saved = q, k, v, bias, do, lse, delta
        dq = dk = dv = dbias = None
        if needs[0]:
            dq = torch.empty_like(q)
            dq_kernel[(q_tiles, R * H)](*saved, dq, H, N, D, scale, **blocks)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[(k_tiles, R * H)](*saved, dk, dv, H, N, D, scale, **blocks)
        if needs[3]:
            dbias = torch.empty_like(bias)
            dbias_kernel[(q_tiles, k_tiles, H)](*saved, dbias, R, H, N, D, scale, **blocks)
        return dq, dk if needs[1] else None, dv if needs[2] else None, dbias


def pair_bias_attention_autograd(q, k, v, bias):
    return PairBiasAttention.apply(q, k, v, bias)
