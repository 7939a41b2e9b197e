"""Attention of many answers to one prompt, the prompt's keys kept once: a group of rollouts in training.

Forward    for answer g of G, token i:  P over all M keys of the prompt, and the answer's own keys j <= i:
           P = softmax(s Q (Kp, K_g)^T),   O = P (Vp, V_g)
Backward   dS = P * (dO (Vp, V_g)^T - delta),  delta_i = <dO_i, O_i>,  dQ = s dS (Kp, K_g),
           dK_g = s dS^T Q,  dV_g = P^T dO over the answer's own rows;
           dKp = s sum_g dS^T Q,   dVp = sum_g P^T dO over the rows of all G answers

Forward schedule: a program owns (query tile of an answer, head); one online softmax walks the prompt, without
a mask, then the answer to the diagonal. lse is saved, in units of log2.
Backward schedule: the keys have two kinds of owners. An answer's key tile is met by its own later rows. The
prompt's tile is met by every row of every answer, and none is masked: so the G answers are one tall matrix of
G T rows, packed that way in memory, and the owner walks them as if they were one sequence, with dKp and dVp
in registers. Repeating the prompt for each answer, as padded batches do, would store G gradients of it and
add them; here the sum over the group is the loop. dQ keeps the forward's ownership; no atomics.

op: shared_prompt_attention
schedule: swap_owner, recompute_from_stats
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
    """Tiles and the precision of dots; products of whole float32 numbers want small tiles."""
    single, BLOCK_D = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[4]))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": (32 if BLOCK_D <= 64 else 16) if single else 64,
        "BLOCK_D": BLOCK_D,
        "num_warps": 4 if single else 8,
        "num_stages": 1,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend(q, k, v, seen, m, total, acc, scale_log2, PRECISION: tl.constexpr):
    """One step of the online softmax; the first tile has a key for every row."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    s = tl.where(seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_new, total * rescale + tl.sum(p, axis=1), acc


@triton.jit
def shared_prompt_kernel(
    q_ptr, kp_ptr, vp_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, G, T, M, D, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    prompt = (tl.program_id(1) // G).to(tl.int64) * M * D  # (batch, head), then the answer
    answer = tl.program_id(1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + answer * D, rows, d, T, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(kp_ptr + prompt, cols, d, M, D)
        v = load_tile(vp_ptr + prompt, cols, d, M, D)
        m, total, acc = attend(q, k, v, cols[None, :] < M, m, total, acc, scale_log2, PRECISION)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + answer * D, cols, d, T, D)
        v = load_tile(v_ptr + answer * D, cols, d, T, D)
        seen = cols[None, :] <= rows[:, None]
        m, total, acc = attend(q, k, v, seen, m, total, acc, scale_log2, PRECISION)
    store_tile(o_ptr + answer * D, acc / total[:, None], rows, d, T, D)
    tl.store(lse_ptr + answer + rows, m + tl.log2(total), mask=rows < T)


def shared_prompt_forward(q, kp, vp, k, v):
    B, H, G, T, D = q.shape
    if not q.shape == k.shape == v.shape or kp.shape != vp.shape:
        raise ValueError("q, k and v must have one shape, and so must kp and vp")
    if kp.shape[:2] != (B, H) or kp.shape[3] != D:
        raise ValueError("the prompt must have the batch, heads and width of the answers")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, M, tiles = torch.empty_like(q), kp.shape[2], tiling(q)
    lse = torch.empty((B, H, G, T), device=q.device, dtype=torch.float32)
    shared_prompt_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H * G)](
        q, kp, vp, k, v, o, lse, G, T, M, D, D**-0.5 * LOG2E, **tiles
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def shared_prompt_attention(q, kp, vp, k, v):
    """q, k, v: (B, H, G, T, D), of the answers; kp, vp: (B, H, M, D), of the prompt."""
    return shared_prompt_forward(*(x.contiguous() for x in (q, kp, vp, k, v)))[0]


def reference(q, kp, vp, k, v):
    scale = q.shape[-1] ** -0.5
    own = scale * q @ k.transpose(-1, -2)
    future = torch.ones(own.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    shared = scale * q @ kp[:, :, None].transpose(-1, -2)
    p = torch.softmax(torch.cat([shared, own.masked_fill(future, -float("inf"))], dim=-1), dim=-1)
    M = kp.shape[2]
    return p[..., :M] @ vp[:, :, None] + p[..., M:] @ v


SWEEP = [
    {"B": 1, "H": 16, "G": 8, "T": 1024, "M": 2048, "D": 128},
    {"B": 2, "H": 3, "G": 5, "T": 509, "M": 1021, "D": 64},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "G": 3, "T": 37, "M": 33, "D": 16},
    {"B": 2, "H": 1, "G": 2, "T": 32, "M": 9, "D": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, G, T, M, D = (dims[name] for name in ("B", "H", "G", "T", "M", "D"))
    q, k, v = (torch.randn(B, H, G, T, D, device=device, dtype=dtype) for _ in range(3))
    kp, vp = (torch.randn(B, H, M, D, device=device, dtype=dtype) for _ in range(2))
    return q, kp, vp, k, v


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, rows_total, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, rows_total, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, rows_total, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < rows_total)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
    return p, p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, R, N, D, scale, scale_log2,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of N keys and the R rows that meet them: an answer's own, or without CAUSAL a group's."""
    group = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + group * N * D, cols, d, N, D)
    v = load_tile(v_ptr + group * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK if CAUSAL else 0, R, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + group * R * D, rows, d, R, D)
        do = load_tile(do_ptr + group * R * D, rows, d, R, D)
        lse = tl.load(lse_ptr + group * R + rows, mask=rows < R, other=0.0)
        delta = tl.load(delta_ptr + group * R + rows, mask=rows < R, other=0.0)
        seen = (rows[:, None] < R) & (cols[None, :] < N)
        if CAUSAL:
            seen = seen & (cols[None, :] <= rows[:, None])
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + group * N * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + group * N * D, dv, cols, d, N, D)


@triton.jit
def query_kernel(
    q_ptr, kp_ptr, vp_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, G, T, M, D, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    prompt = (tl.program_id(1) // G).to(tl.int64) * M * D
    answer = tl.program_id(1).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + answer * D, rows, d, T, D)
    do = load_tile(do_ptr + answer * D, rows, d, T, D)
    lse = tl.load(lse_ptr + answer + rows, mask=rows < T, other=0.0)
    delta = tl.load(delta_ptr + answer + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(kp_ptr + prompt, cols, d, M, D)
        v = load_tile(vp_ptr + prompt, cols, d, M, D)
        seen = (rows[:, None] < T) & (cols[None, :] < M)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + answer * D, cols, d, T, D)
        v = load_tile(v_ptr + answer * D, cols, d, T, D)
        seen = (rows[:, None] < T) & (cols[None, :] <= rows[:, None])
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, seen, scale_log2, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + answer * D, dq * scale, rows, d, T, D)


class SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(x.contiguous() for x in inputs)
        o, lse = shared_prompt_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, kp, vp, k, v, o, lse = ctx.saved_tensors
        do, needs, tiles = do.contiguous(), ctx.needs_input_grad, tiling(q)
        (B, H, G, T, D), M, BLOCK = q.shape, kp.shape[2], tiles["BLOCK"]
        scales = (D**-0.5, D**-0.5 * LOG2E)
        dq, dkp, dvp, dk, dv = (torch.empty_like(x) for x in (q, kp, vp, k, v))
        delta, rows = torch.empty_like(lse), lse.numel()
        delta_kernel[(triton.cdiv(rows, 32),)](o, do, delta, rows, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"])
        if needs[0]:
            query_kernel[(triton.cdiv(T, BLOCK), B * H * G)](
                q, kp, vp, k, v, do, lse, delta, dq, G, T, M, D, *scales, **tiles
            )
        if needs[1] or needs[2]:
            key_kernel[(triton.cdiv(M, BLOCK), B * H)](
                q, kp, vp, do, lse, delta, dkp, dvp, G * T, M, D, *scales, CAUSAL=False, **tiles
            )
        if needs[3] or needs[4]:
            key_kernel[(triton.cdiv(T, BLOCK), B * H * G)](
                q, k, v, do, lse, delta, dk, dv, T, T, D, *scales, CAUSAL=True, **tiles
            )
        grads = zip((dq, dkp, dvp, dk, dv), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def shared_prompt_attention_autograd(q, kp, vp, k, v):
    return SharedPromptAttention.apply(q, kp, vp, k, v)
