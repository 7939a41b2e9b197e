"""Causal attention whose scores are capped by a tanh.

Forward    Z = s Q K^T,  C = c tanh(Z / c),  P = softmax(C with -inf for j > i),  O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dC = P * (dP - delta),  delta_i = <dO_i, O_i>.
           dC/dZ = 1 - tanh^2(Z / c) = 1 - (C / c)^2, so dZ = dC * (1 - (C / c)^2),
           dQ = s dZ K,  dK = s dZ^T Q.  dV does not see the cap's slope.

Forward schedule: a program owns a tile of queries and walks the keys up to the diagonal with an online
softmax. The cap is applied inside the loop, tanh(u) = 1 - 2 / (e^{2u} + 1), which goes to 1 and -1 where
e^{2u} over- and underflows. It saves lse, in units of log2.
Backward schedule: key owners (dK, dV) and query owners (dQ) rebuild the tile of P, as ever. The tanh that P
takes is the one that the slope needs: it is made once per tile and used twice, and neither Z nor a slope is
stored. The slope enters at one place, in dZ, so that both owners share one function; the row sum delta stays
<dO, O>, for the softmax sits outside the cap.

op: softcap_attention
schedule: swap_owner, recompute_from_stats
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
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def capped_scores(q, k, scale, cap, PRECISION: tl.constexpr):
    """C / c, that is tanh(Z / c), of one tile."""
    u = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale / cap)
    return 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)


@triton.jit
def softcap_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, N, D, scale, cap,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = capped_scores(q, k, scale, cap, PRECISION) * (cap * LOG2E)
        s = tl.where((cols[None, :] <= rows[:, None]) & (cols[None, :] < N), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def softcap_attention_forward(q, k, v, cap):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    if cap <= 0:
        raise ValueError(f"a cap of {cap} leaves no scores")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    softcap_attention_kernel[(triton.cdiv(N, 64), B * H)](q, k, v, o, lse, N, D, D**-0.5, cap, **tiling(q))
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def softcap_attention(q, k, v, cap):
    """q, k, v: (B, H, N, D); scores lie in (-cap, cap)."""
    return softcap_attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), cap)[0]


def reference(q, k, v, cap):
    N, D = q.shape[-2:]
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    capped = cap * torch.tanh(D**-0.5 / cap * q @ k.transpose(-1, -2))
    return torch.softmax(capped.masked_fill(future, -float("inf")), dim=-1) @ v


SWEEP = [{"B": 2, "H": 8, "N": 4096, "D": 128}, {"B": 1, "H": 16, "N": 2003, "D": 64}]
SWEEP_CPU = [{"B": 2, "H": 2, "N": 70, "D": 32}, {"B": 1, "H": 1, "N": 130, "D": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return 2 * q, k, v, 3.0


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, N, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr + head * D, rows, d, N, D).to(tl.float32)
    do = load_tile(do_ptr + head * D, rows, d, N, D).to(tl.float32)
    tl.store(delta_ptr + head + rows, tl.sum(o * do, axis=1), mask=rows < N)


@triton.jit
def rebuild_p_dz(q, k, v, do, lse, delta, rows, cols, N, scale, cap, PRECISION: tl.constexpr):
    """P and dZ of one tile, rows of queries by columns of keys."""
    t = capped_scores(q, k, scale, cap, PRECISION)
    visible = (cols[None, :] <= rows[:, None]) & (rows[:, None] < N)
    p = tl.where(visible, tl.exp2(t * (cap * LOG2E) - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None]) * (1.0 - t * t)


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, scale, cap,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, N, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, dz = rebuild_p_dz(q, k, v, do, lse, delta, rows, cols, N, scale, cap, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N, D, scale, cap,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, dz = rebuild_p_dz(q, k, v, do, lse, delta, rows, cols, N, scale, cap, PRECISION)
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class SoftcapAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cap):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = softcap_attention_forward(q, k, v, cap)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.cap = cap
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        scale, cap = D**-0.5, ctx.cap
        blocks = tiling(q)
        q_grid, k_grid = (triton.cdiv(N, 64), B * H), (triton.cdiv(N, 32), B * H)
        delta = torch.empty_like(lse)
        delta_kernel[q_grid](o, do, delta, N, D, BLOCK_M=64, BLOCK_D=blocks["BLOCK_D"])
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            dq_kernel[q_grid](q, k, v, do, lse, delta, dq, N, D, scale, cap, **blocks)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            dk_dv_kernel[k_grid](q, k, v, do, lse, delta, dk, dv, N, D, scale, cap, **blocks)
        return dq, dk if ctx.needs_input_grad[1] else None, dv if ctx.needs_input_grad[2] else None, None


def softcap_attention_autograd(q, k, v, cap):
    return SoftcapAttention.apply(q, k, v, cap)
