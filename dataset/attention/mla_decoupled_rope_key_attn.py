"""Latent attention as it is trained: each head has keys of its own, and all heads share one rotary part.

Forward    S_h = s (Qn_h Kn_h^T + Qr_h Kr^T) for j <= i,   P_h = softmax(S_h),   O_h = P_h V_h
           (Kn and V unfolded from the latent, a head each; Kr one for all heads; s = (Dn + Dr)^-1/2)
Backward   dS_h = P_h * (dO_h V_h^T - delta_h),   delta_h,i = <dO_h,i , O_h,i>,
           dQn_h = s dS_h Kn_h,   dQr_h = s dS_h Kr,   dV_h = P_h^T dO_h,
           dKn_h = s dS_h^T Qn_h,   dKr = s sum_h dS_h^T Qr_h

Forward schedule: a program owns (query tile, head) and walks the keys up to the diagonal with an online
softmax; a score is two dots into one tile, so the parts are never concatenated and Kr is never expanded. lse
is saved, in units of log2.
Backward schedule: the owner of (key tile, head) walks the later queries and has dKn and dV whole. Kr has a
sum over heads on top. To let its owner walk all heads as well would make one program of H: there would be
too few of them, or everything would be rebuilt once more for dKr alone. So a head's part of dKr rides along
in registers, Dr columns beside Dn + Dv, goes to a slot of the head, and a second kernel adds the H slots:
the slots are the narrow part of the keys, a fraction of dKn. dQn and dQr keep the forward's ownership.

op: mla_attention
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(qn, qr, v):
    single = qn.dtype == torch.float32
    BLOCK_N, BLOCK_R, BLOCK_V = (max(16, triton.next_power_of_2(x.shape[3])) for x in (qn, qr, v))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 16 if single and BLOCK_N > 64 else 32,
        "BLOCK_N": BLOCK_N,
        "BLOCK_R": BLOCK_R,
        "BLOCK_V": BLOCK_V,
        "num_warps": 4,
        "num_stages": 1 if single else 2,
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
def mla_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, v_ptr, o_ptr, lse_ptr, T, H, N, R, V, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    shared = (tl.program_id(1) // H).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n, r, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    qn = load_tile(qn_ptr + head * N, rows, n, T, N)
    qr = load_tile(qr_ptr + head * R, rows, r, T, R)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        kn = load_tile(kn_ptr + head * N, cols, n, T, N)
        kr = load_tile(kr_ptr + shared * R, cols, r, T, R)
        v = load_tile(v_ptr + head * V, cols, e, T, V)
        s = tl.dot(qr, tl.trans(kr), input_precision=PRECISION)
        s = tl.dot(qn, tl.trans(kn), s, input_precision=PRECISION) * scale_log2
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * V, acc / total[:, None], rows, e, T, V)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < T)


def sizes_and_scale(qn, qr, v):
    """T, H, the three widths, and the scale of the scores."""
    (_, H, T, N), R, V = qn.shape, qr.shape[3], v.shape[3]
    return (T, H, N, R, V), (N + R) ** -0.5


def mla_forward(qn, qr, kn, kr, v):
    (T, H, N, R, V), scale = sizes_and_scale(qn, qr, v)
    B = qn.shape[0]
    if kn.shape != qn.shape or kr.shape != (B, T, R):
        raise ValueError("kn must have the shape of qn, and kr one row a token, as wide as qr")
    if qr.shape[:3] != qn.shape[:3] or v.shape[:3] != qn.shape[:3]:
        raise ValueError("qn, qr and v must agree in batch, heads and tokens")
    if N > 128 or R > 64 or V > 128:
        raise ValueError(f"widths {N}, {R} and {V} do not fit one tile")
    o = torch.empty_like(v)
    lse = torch.empty((B, H, T), device=v.device, dtype=torch.float32)
    tiles = tiling(qn, qr, v)
    mla_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H)](
        qn, qr, kn, kr, v, o, lse, T, H, N, R, V, scale * LOG2E, **tiles
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def mla_attention(qn, qr, kn, kr, v):
    """qn, kn: (B, H, T, N); qr: (B, H, T, R); kr: (B, T, R); v: (B, H, T, V)."""
    return mla_forward(*(x.contiguous() for x in (qn, qr, kn, kr, v)))[0]


def reference(qn, qr, kn, kr, v):
    s = qn @ kn.transpose(-1, -2) + qr @ kr[:, None].transpose(-1, -2)
    future = torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool).triu(1)
    s = (qn.shape[3] + qr.shape[3]) ** -0.5 * s
    return torch.softmax(s.masked_fill(future, -float("inf")), dim=-1) @ v


SWEEP = [
    {"B": 1, "H": 16, "T": 4096, "N": 128, "R": 64, "V": 128},
    {"B": 2, "H": 5, "T": 1021, "N": 64, "R": 32, "V": 96},
]
SWEEP_CPU = [
    {"B": 1, "H": 3, "T": 45, "N": 24, "R": 8, "V": 16},
    {"B": 2, "H": 2, "T": 33, "N": 16, "R": 16, "V": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, N, R, V = (dims[name] for name in ("B", "H", "T", "N", "R", "V"))
    shapes = ((B, H, T, N), (B, H, T, R), (B, H, T, N), (B, T, R), (B, H, T, V))
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, rows_total, V, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_V)
    o = load_tile(o_ptr, rows, e, rows_total, V).to(tl.float32)
    do = load_tile(do_ptr, rows, e, rows_total, V).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < rows_total)


@triton.jit
def rebuild_p_ds(
    qn, qr, kn, kr, v, do, lse_ptr, delta_ptr, rows, cols, T, scale_log2, PRECISION: tl.constexpr
):
    s = tl.dot(qr, tl.trans(kr), input_precision=PRECISION)
    s = tl.dot(qn, tl.trans(kn), s, input_precision=PRECISION) * scale_log2
    lse = tl.load(lse_ptr + rows, mask=rows < T, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=rows < T, other=0.0)
    seen = (rows[:, None] < T) & (cols[None, :] <= rows[:, None])
    p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
    return p, p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])


@triton.jit
def key_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dkn_ptr, slots_ptr, dv_ptr,
    T, H, N, R, V, scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    shared = (tl.program_id(1) // H).to(tl.int64) * T
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n, r, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    kn = load_tile(kn_ptr + head * N, cols, n, T, N)
    kr = load_tile(kr_ptr + shared * R, cols, r, T, R)
    v = load_tile(v_ptr + head * V, cols, e, T, V)
    dkn = tl.zeros([BLOCK, BLOCK_N], dtype=tl.float32)
    dkr = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        qn = load_tile(qn_ptr + head * N, rows, n, T, N)
        qr = load_tile(qr_ptr + head * R, rows, r, T, R)
        do = load_tile(do_ptr + head * V, rows, e, T, V)
        p, ds = rebuild_p_ds(
            qn, qr, kn, kr, v, do, lse_ptr + head, delta_ptr + head, rows, cols, T, scale_log2, PRECISION
        )
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = tl.trans(ds.to(qn.dtype))
        dkn = tl.dot(ds, qn, dkn, input_precision=PRECISION)
        dkr = tl.dot(ds, qr, dkr, input_precision=PRECISION)
    store_tile(dkn_ptr + head * N, dkn * scale, cols, n, T, N)
    store_tile(slots_ptr + head * R, dkr * scale, cols, r, T, R)
    store_tile(dv_ptr + head * V, dv, cols, e, T, V)


@triton.jit
def query_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dqn_ptr, dqr_ptr,
    T, H, N, R, V, scale, scale_log2, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    shared = (tl.program_id(1) // H).to(tl.int64) * T
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n, r, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    qn = load_tile(qn_ptr + head * N, rows, n, T, N)
    qr = load_tile(qr_ptr + head * R, rows, r, T, R)
    do = load_tile(do_ptr + head * V, rows, e, T, V)
    dqn = tl.zeros([BLOCK, BLOCK_N], dtype=tl.float32)
    dqr = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        kn = load_tile(kn_ptr + head * N, cols, n, T, N)
        kr = load_tile(kr_ptr + shared * R, cols, r, T, R)
        v = load_tile(v_ptr + head * V, cols, e, T, V)
        _, ds = rebuild_p_ds(
            qn, qr, kn, kr, v, do, lse_ptr + head, delta_ptr + head, rows, cols, T, scale_log2, PRECISION
        )
        dqn = tl.dot(ds.to(kn.dtype), kn, dqn, input_precision=PRECISION)
        dqr = tl.dot(ds.to(kr.dtype), kr, dqr, input_precision=PRECISION)
    store_tile(dqn_ptr + head * N, dqn * scale, rows, n, T, N)
    store_tile(dqr_ptr + head * R, dqr * scale, rows, r, T, R)


@triton.jit
def head_sum_kernel(slots_ptr, out_ptr, H, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1).to(tl.int64)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for h in range(H):
        acc += tl.load(slots_ptr + (batch * H + h) * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + batch * size + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


class MlaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(x.contiguous() for x in inputs)
        o, lse = mla_forward(*inputs)
        ctx.save_for_backward(*inputs, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        *inputs, o, lse = ctx.saved_tensors
        qn, qr, v = inputs[0], inputs[1], inputs[4]
        (T, H, N, R, V), scale = sizes_and_scale(qn, qr, v)
        B, do, needs, tiles = qn.shape[0], do.contiguous(), ctx.needs_input_grad, tiling(qn, qr, v)
        dqn, dqr, dkn, dkr, dv = (torch.empty_like(x) for x in inputs)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * T, 32),)](
            o, do, delta, B * H * T, V, BLOCK=32, BLOCK_V=tiles["BLOCK_V"]
        )
        grid, sizes = (triton.cdiv(T, tiles["BLOCK"]), B * H), (T, H, N, R, V, scale, scale * LOG2E)
        if needs[0] or needs[1]:
            query_kernel[grid](*inputs, do, lse, delta, dqn, dqr, *sizes, **tiles)
        if needs[2] or needs[3] or needs[4]:
            slots = torch.empty(qr.shape, device=qr.device, dtype=torch.float32)
            key_kernel[grid](*inputs, do, lse, delta, dkn, slots, dv, *sizes, **tiles)
            if needs[3]:
                head_sum_kernel[(triton.cdiv(T * R, 256), B)](slots, dkr, H, T * R, BLOCK=256)
        grads = zip((dqn, dqr, dkn, dkr, dv), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def mla_attention_autograd(qn, qr, kn, kr, v):
    return MlaAttention.apply(qn, qr, kn, kr, v)
