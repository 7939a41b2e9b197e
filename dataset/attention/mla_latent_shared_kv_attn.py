"""Multi-head latent attention in its absorbed form: one latent row is key and value of all heads.

Forward    S_h = s (Qc_h C^T + Qr_h R^T) for j <= i,  P_h = softmax(S_h),  O_h = P_h C
           with the latent C (N, Dc), the rotary key R (N, Dr), and s = (Dc + Dr)^-1/2
Backward   dS_h = P_h * (dO_h C^T - delta_h),  delta_h,i = <dO_h,i , O_h,i>,
           dQc_h = s dS_h C,   dQr_h = s dS_h R,
           dC = sum_h (s dS_h^T Qc_h + P_h^T dO_h),   dR = s sum_h dS_h^T Qr_h
           C stands in two places, as key and as value, so its gradient has two routes.

Forward schedule: a program owns (query tile, head) and walks the latent tiles up to the diagonal with an
online softmax. A latent tile is loaded once a step and is both operands: of the scores, transposed, and of
P C. The row statistic lse is saved, in units of log2.
Backward schedule: a latent tile is read by all heads and all later queries, so it gets an owner that walks
both, with dC and dR in registers. Both routes of dC add into one accumulator, where two kernels, one for keys
and one for values, would each store a tensor of N x Dc a head to be summed afterwards. P and dS are rebuilt
from lse. dQ keeps the forward's ownership. No atomics. Wide latents (512) take tiles of 16 rows: an
accumulator of 16 x 512 still fits the registers of a program.

op: latent_attention
schedule: swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q_c, q_r):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_C, BLOCK_R = (max(16, triton.next_power_of_2(q.shape[3])) for q in (q_c, q_r))
    BLOCK = 32 if BLOCK_C <= 128 else 16
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_C": BLOCK_C, "BLOCK_R": BLOCK_R}


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def score_tile(qc, qr, c, r, scale_log2, PRECISION: tl.constexpr):
    s = tl.dot(qr, tl.trans(r), input_precision=PRECISION)
    return tl.dot(qc, tl.trans(c), s, input_precision=PRECISION) * scale_log2


@triton.jit
def latent_attention_kernel(
    qc_ptr, qr_ptr, c_ptr, r_ptr, o_ptr, lse_ptr, H, N, DC, DR, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    batch = (tl.program_id(1) // H).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dc, dr = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    qc = load_tile(qc_ptr + head * DC, rows, dc, N, DC)
    qr = load_tile(qr_ptr + head * DR, rows, dr, N, DR)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        c = load_tile(c_ptr + batch * DC, cols, dc, N, DC)
        r = load_tile(r_ptr + batch * DR, cols, dr, N, DR)
        s = score_tile(qc, qr, c, r, scale_log2, PRECISION)
        s = tl.where(cols[None, :] <= rows[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c.dtype), c, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * DC, acc / total[:, None], rows, dc, N, DC)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def latent_attention_forward(qc, qr, c, r):
    B, H, N, DC = qc.shape
    DR = qr.shape[3]
    if qr.shape[:3] != (B, H, N) or c.shape != (B, N, DC) or r.shape != (B, N, DR):
        raise ValueError(
            "qc and qr must agree but for their last size, and c and r be the same without heads"
        )
    if DC > 512 or DR > 128:
        raise ValueError(f"a latent of {DC} and {DR} does not fit one tile")
    o = torch.empty_like(qc)
    lse = torch.empty((B, H, N), device=qc.device, dtype=torch.float32)
    tiles = tiling(qc, qr)
    latent_attention_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](
        qc, qr, c, r, o, lse, H, N, DC, DR, (DC + DR) ** -0.5 * LOG2E, **tiles
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def latent_attention(qc, qr, c, r):
    """qc: (B, H, N, Dc); qr: (B, H, N, Dr); c: (B, N, Dc), the latent; r: (B, N, Dr), the rotary key."""
    return latent_attention_forward(qc.contiguous(), qr.contiguous(), c.contiguous(), r.contiguous())[0]


def reference(qc, qr, c, r):
    s = qc @ c[:, None].transpose(-1, -2) + qr @ r[:, None].transpose(-1, -2)
    future = torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool).triu(1)
    s = (s * (qc.shape[3] + qr.shape[3]) ** -0.5).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ c[:, None]


SWEEP = [
    {"B": 2, "H": 16, "N": 1024, "DC": 512, "DR": 64},
    {"B": 1, "H": 40, "N": 1009, "DC": 256, "DR": 32},
]
SWEEP_CPU = [
    {"B": 1, "H": 4, "N": 35, "DC": 32, "DR": 16},
    {"B": 2, "H": 3, "N": 67, "DC": 40, "DR": 8},
    {"B": 1, "H": 2, "N": 33, "DC": 144, "DR": 20},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, DC, DR = (dims[key] for key in ("B", "H", "N", "DC", "DR"))
    qc, c = (torch.randn(*shape, DC, device=device, dtype=dtype) for shape in ((B, H, N), (B, N)))
    qr, r = (torch.randn(*shape, DR, device=device, dtype=dtype) for shape in ((B, H, N), (B, N)))
    return qc, qr, c, r


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=0))


@triton.jit
def rebuild_p_ds(qc, qr, c, r, do, lse, delta, rows, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of latents."""
    s = score_tile(qc, qr, c, r, scale_log2, PRECISION)
    seen = (rows[:, None] < N) & (cols[None, :] <= rows[:, None])
    p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(c), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def latent_kernel(
    qc_ptr, qr_ptr, c_ptr, r_ptr, do_ptr, lse_ptr, delta_ptr, dc_ptr, dr_ptr, H, N, DC, DR,
    scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dC and dR of a latent tile, from all heads and all queries from its diagonal on."""
    batch = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ic, ir = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    c = load_tile(c_ptr + batch * DC, cols, ic, N, DC)
    r = load_tile(r_ptr + batch * DR, cols, ir, N, DR)
    dc = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    dr = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for h in range(H):
        head = batch * H + h * N
        for start in range(tl.program_id(0) * BLOCK, N, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            qc = load_tile(qc_ptr + head * DC, rows, ic, N, DC)
            qr = load_tile(qr_ptr + head * DR, rows, ir, N, DR)
            do = load_tile(do_ptr + head * DC, rows, ic, N, DC)
            lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
            delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
            p, ds = rebuild_p_ds(qc, qr, c, r, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
            dc = tl.dot(tl.trans(p.to(do.dtype)), do, dc, input_precision=PRECISION)
            ds = tl.trans((ds * scale).to(qc.dtype))
            dc = tl.dot(ds, qc, dc, input_precision=PRECISION)
            dr = tl.dot(ds, qr, dr, input_precision=PRECISION)
    store_tile(dc_ptr + batch * DC, dc, cols, ic, N, DC)
    store_tile(dr_ptr + batch * DR, dr, cols, ir, N, DR)


@triton.jit
def query_kernel(
    qc_ptr, qr_ptr, c_ptr, r_ptr, do_ptr, lse_ptr, delta_ptr, dqc_ptr, dqr_ptr, H, N, DC, DR,
    scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    batch = (tl.program_id(1) // H).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ic, ir = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    qc = load_tile(qc_ptr + head * DC, rows, ic, N, DC)
    qr = load_tile(qr_ptr + head * DR, rows, ir, N, DR)
    do = load_tile(do_ptr + head * DC, rows, ic, N, DC)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    dqc = tl.zeros([BLOCK, BLOCK_C], dtype=tl.float32)
    dqr = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        c = load_tile(c_ptr + batch * DC, cols, ic, N, DC)
        r = load_tile(r_ptr + batch * DR, cols, ir, N, DR)
        _, ds = rebuild_p_ds(qc, qr, c, r, do, lse, delta, rows, cols, N, scale_log2, PRECISION)
        ds = ds.to(c.dtype)
        dqc = tl.dot(ds, c, dqc, input_precision=PRECISION)
        dqr = tl.dot(ds, r, dqr, input_precision=PRECISION)
    store_tile(dqc_ptr + head * DC, dqc * scale, rows, ic, N, DC)
    store_tile(dqr_ptr + head * DR, dqr * scale, rows, ir, N, DR)


class LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qc, qr, c, r):
        qc, qr, c, r = qc.contiguous(), qr.contiguous(), c.contiguous(), r.contiguous()
        o, lse = latent_attention_forward(qc, qr, c, r)
        ctx.save_for_backward(qc, qr, c, r, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        qc, qr, c, r, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (B, H, N, DC), DR = qc.shape, qr.shape[3]
        scale, tiles, needed = (DC + DR) ** -0.5, tiling(qc, qr), ctx.needs_input_grad
        sizes = (H, N, DC, DR, scale, scale * LOG2E)
        blocks = triton.cdiv(N, tiles["BLOCK"])
        delta = torch.empty_like(lse)
        delta_kernel[(B * H * N,)](o, do, delta, DC, BLOCK_D=tiles["BLOCK_C"])
        dqc = dqr = dc = dr = None
        if needed[0] or needed[1]:
            dqc, dqr = torch.empty_like(qc), torch.empty_like(qr)
            query_kernel[(blocks, B * H)](qc, qr, c, r, do, lse, delta, dqc, dqr, *sizes, **tiles)
        if needed[2] or needed[3]:
            dc, dr = torch.empty_like(c), torch.empty_like(r)
            latent_kernel[(blocks, B)](qc, qr, c, r, do, lse, delta, dc, dr, *sizes, **tiles)
        grads = zip((dqc, dqr, dc, dr), needed, strict=True)
        return tuple(grad if wanted else None for grad, wanted in grads)


def latent_attention_autograd(qc, qr, c, r):
    return LatentAttention.apply(qc, qr, c, r)
