"""Cosine attention: logits are cosines of query and key times a learned number a head.

Forward    xhat = x r,  r = (<x, x> + eps)^(-1/2) for each row of Q and K,
           S_ij = tau_h c_ij,  c_ij = <qhat_i, khat_j>,  P = softmax(S),  O = P V
Backward   dS = P * (dO V^T - delta),  delta_i = <dO_i, O_i>,  dV = P^T dO,
           with  E = dS Khat,  F = dS^T Qhat:   dQhat = tau E,  dKhat = tau F.
           A unit vector's gradient loses its part along the vector:
           dq_i = tau r_i (E_i - qhat_i <E_i, qhat_i>),  and the same for k with F;
           dtau = sum_ij dS_ij c_ij = sum_i <sum_j dS_ij khat_j, qhat_i> = sum_i <E_i, qhat_i>

Forward schedule: a small kernel normalises the rows of Q and of K once, as every tile of keys is met by many
tiles of queries; it stores xhat and r. A program owns a query tile and walks the keys. lse is saved, in log2.
Backward schedule: the owner of a query tile has E whole in registers at the end of its walk, and one row dot,
<E_i, qhat_i>, is both: what the projection takes away, and the row's share of dtau. So the temperature's
gradient costs no multiplication by c inside the walk, and dQhat and dKhat are never stored, as each owner
projects in its epilogue. A program's share of dtau is one number in a slot, added by a last kernel.

op: cosine_attention
schedule: swap_owner, partials_then_reduce, row_reduce_correct, recompute_from_stats
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
def normalise_kernel(x_ptr, xhat_ptr, r_ptr, R, D, eps, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, rows, d, R, D).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1) + eps)
    store_tile(xhat_ptr, x * r[:, None], rows, d, R, D)
    tl.store(r_ptr + rows, r, mask=rows < R)


@triton.jit
def cosine_kernel(
    q_ptr, k_ptr, v_ptr, tau_ptr, o_ptr, lse_ptr, H, N, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    scale_log2 = tl.load(tau_ptr + tl.program_id(1) % H).to(tl.float32) * LOG2E
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
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    store_tile(o_ptr + head * D, acc / total[:, None], rows, d, N, D)
    tl.store(lse_ptr + head + rows, m + tl.log2(total), mask=rows < N)


def cosine_forward(q, k, v, tau, eps):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or tau.shape != (H,):
        raise ValueError("q, k and v must have one shape, and tau a number a head")
    if D == 1 or D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile, or has no directions but two")
    tiles = tiling(q)
    hats, norms = [], []
    for x in (q, k):
        xhat, r = torch.empty_like(x), torch.empty((B, H, N), device=x.device, dtype=torch.float32)
        normalise_kernel[(triton.cdiv(B * H * N, 32),)](
            x, xhat, r, B * H * N, D, eps, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        hats.append(xhat)
        norms.append(r)
    o, lse = torch.empty_like(q), torch.empty_like(norms[0])
    cosine_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](*hats, v, tau, o, lse, H, N, D, **tiles)
    return o, lse, *hats, *norms


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def cosine_attention(q, k, v, tau, eps=1e-6):
    """q, k, v: (batch, heads, tokens, dim); tau: (heads)."""
    return cosine_forward(q.contiguous(), k.contiguous(), v.contiguous(), tau.contiguous(), eps)[0]


def reference(q, k, v, tau, eps=1e-6):
    qhat, khat = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps) for x in (q, k))
    return torch.softmax(tau[:, None, None] * (qhat @ khat.transpose(-1, -2)), dim=-1) @ v


SWEEP = [{"B": 128, "H": 6, "N": 256, "D": 32}, {"B": 4, "H": 8, "N": 1001, "D": 64}]
SWEEP_CPU = [{"B": 2, "H": 2, "N": 29, "D": 16}, {"B": 1, "H": 1, "N": 40, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[key] for key in ("B", "H", "N", "D"))
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, 5 + 5 * torch.rand(H, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    o = load_tile(o_ptr, rows, d, R, D).to(tl.float32)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(o * do, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, do, lse, delta, cols, N, scale_log2, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    p = tl.exp2(tl.where(cols[None, :] < N, s - lse[:, None], -float("inf")))
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, tau_ptr, do_ptr, lse_ptr, delta_ptr, r_ptr, dq_ptr, slots_ptr, H, N, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    tau = tl.load(tau_ptr + tl.program_id(1) % H).to(tl.float32)
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
    E = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, tau * LOG2E, PRECISION)
        E = tl.dot(ds.to(k.dtype), k, E, input_precision=PRECISION)
    qhat = q.to(tl.float32)
    along = tl.sum(E * qhat, axis=1)
    r = tl.load(r_ptr + head + rows, mask=rows < N, other=0.0)
    store_tile(dq_ptr + head * D, (tau * r)[:, None] * (E - qhat * along[:, None]), rows, d, N, D)
    tl.store(slots_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(along))


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, tau_ptr, do_ptr, lse_ptr, delta_ptr, r_ptr, dk_ptr, dv_ptr, H, N, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    tau = tl.load(tau_ptr + tl.program_id(1) % H).to(tl.float32)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    F = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        lse = tl.load(lse_ptr + head + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(delta_ptr + head + rows, mask=rows < N, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, do, lse, delta, cols, N, tau * LOG2E, PRECISION)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        F = tl.dot(tl.trans(ds.to(q.dtype)), q, F, input_precision=PRECISION)
    khat = k.to(tl.float32)
    r = tl.load(r_ptr + head + cols, mask=cols < N, other=0.0)
    dk = (tau * r)[:, None] * (F - khat * tl.sum(F * khat, axis=1)[:, None])
    store_tile(dk_ptr + head * D, dk, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def dtau_kernel(slots_ptr, dtau_ptr, B, H, T, BLOCK: tl.constexpr):
    """Sum of slots (B, H, T) over batch and tiles, a program a head."""
    h = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(slots_ptr + (i // T * H + h) * T + i % T, mask=i < B * T, other=0.0)
    tl.store(dtau_ptr + h, tl.sum(acc).to(dtau_ptr.dtype.element_ty))


class CosineAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tau, eps):
        q, k, v, tau = q.contiguous(), k.contiguous(), v.contiguous(), tau.contiguous()
        o, lse, qhat, khat, rq, rk = cosine_forward(q, k, v, tau, eps)
        ctx.save_for_backward(qhat, khat, v, tau, o, lse, rq, rk)
        return o

    @staticmethod
    def backward(ctx, do):
        qhat, khat, v, tau, o, lse, rq, rk = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, N, D), tiles = qhat.shape, tiling(qhat)
        T = triton.cdiv(N, tiles["BLOCK"])
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do, delta, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (qhat, khat, v, tau, do, lse, delta)
        dq = dk = dv = dtau = None
        if needs[0] or needs[3]:
            dq, slots = torch.empty_like(qhat), lse.new_empty((B, H, T))
            query_kernel[(T, B * H)](*seen, rq, dq, slots, H, N, D, **tiles)
            if needs[3]:
                dtau = torch.empty_like(tau)
                dtau_kernel[(H,)](slots, dtau, B, H, T, BLOCK=64)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(khat), torch.empty_like(v)
            key_kernel[(T, B * H)](*seen, rk, dk, dv, H, N, D, **tiles)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dtau, None


def cosine_attention_autograd(q, k, v, tau, eps=1e-6):
    return CosineAttention.apply(q, k, v, tau, eps)
