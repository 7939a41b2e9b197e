"""Prefix language model: a prefix of each sequence sees itself both ways, what comes after it is causal.

Forward    i sees j if j <= i or j < R_b, R_b the length of batch entry b's prefix;
           P = softmax of s Q K^T over what is seen,  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           all 0 where nothing is seen

Forward schedule: a query tile's owner walks the keys up to its diagonal or the end of the prefix, whichever
is later. Only tiles that the diagonal crosses outside of the prefix have something to mask, but the mask is
two comparisons and is always made. lse is saved, in units of log2, and O in float32: where one key has nearly
all of P, dS is a difference of nearly equal numbers, and a delta of rounded O would be all of it.
Backward schedule: mirrored. Seen from key j: a key of the prefix is seen by all queries, another by those
from j on. So the owner of a key tile starts at the first query if the tile begins inside the prefix, else at
its diagonal; a query's owner ends late, a key's owner begins early, for the same reason. Owners of the
prefix's keys walk the whole sequence: the longest programs are those of the first tiles, which a GPU starts
first. The lengths are read in the kernels, so batch entries of different prefixes cost what each of them
needs.

op: prefix_lm_attention
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
def prefix_lm_kernel(
    q_ptr, k_ptr, v_ptr, prefix_ptr, o_ptr, exact_ptr, lse_ptr, H, N, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    R = tl.load(prefix_ptr + tl.program_id(1) // H)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(tl.maximum(first + BLOCK, R), N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        seen = ((cols[None, :] <= rows[:, None]) | (cols[None, :] < R)) & (cols[None, :] < N)
        s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    o = acc / total[:, None]
    store_tile(o_ptr + head * D, o, rows, d, N, D)
    store_tile(exact_ptr + head * D, o, rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def prefix_lm_forward(q, k, v, prefix):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or prefix.shape != (B,):
        raise ValueError("q, k and v must have one shape, and prefix a length a batch entry")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, exact, tiles = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32), tiling(q)
    lse = torch.empty((B, H, N), device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
    prefix_lm_kernel[grid](q, k, v, prefix, o, exact, lse, H, N, D, D**-0.5 * LOG2E, **tiles)
    return o, exact, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def prefix_lm_attention(q, k, v, prefix):
    """q, k, v: (batch, heads, tokens, dim); prefix: int64 (batch), tokens of the prefix."""
    return prefix_lm_forward(q.contiguous(), k.contiguous(), v.contiguous(), prefix.contiguous())[0]


def reference(q, k, v, prefix):
    j = torch.arange(q.shape[2], device=q.device)
    seen = (j <= j[:, None]) | (j < prefix[:, None, None, None])
    s = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [{"B": 4, "H": 16, "N": 2048, "D": 64}, {"B": 2, "H": 8, "N": 1531, "D": 128}]
SWEEP_CPU = [{"B": 2, "H": 2, "N": 70, "D": 16}, {"B": 3, "H": 1, "N": 40, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randint(0, N // 2 + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, R, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    seen = ((cols[None, :] <= rows[:, None]) | (cols[None, :] < R)) & (cols[None, :] < N)
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, prefix_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    R = tl.load(prefix_ptr + tl.program_id(1) // H)
    first = tl.program_id(0) * BLOCK
    rows, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, tl.minimum(tl.maximum(first + BLOCK, R), N), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, R, N, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, prefix_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, N, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    R = tl.load(prefix_ptr + tl.program_id(1) // H)
    first = tl.program_id(0) * BLOCK
    cols, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.where(first < R, 0, first), N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, rows, cols, R, N, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


class PrefixLMAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prefix):
        q, k, v, prefix = q.contiguous(), k.contiguous(), v.contiguous(), prefix.contiguous()
        o, exact, lse = prefix_lm_forward(q, k, v, prefix)
        ctx.save_for_backward(q, k, v, prefix, exact, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, prefix, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), tiles = q.shape, tiling(q)
        grid = (triton.cdiv(N, tiles["BLOCK"]), B * H)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen, sizes = (q, k, v, prefix, do, lse, delta), (H, N, D, D**-0.5, D**-0.5 * LOG2E)
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](*seen, dq, *sizes, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](*seen, dk, dv, *sizes, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None, None


def prefix_lm_attention_autograd(q, k, v, prefix):
    return PrefixLMAttention.apply(q, k, v, prefix)
