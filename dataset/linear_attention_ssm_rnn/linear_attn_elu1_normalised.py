"""Causal linear attention with positive features and a normaliser, in one walk over the chunks of a head.

Forward    phi(x) = x + 1 for x > 0, e^x below;   f_t = phi(q_t),  g_t = phi(k_t);
           S_t = S_{t-1} + g_t v_t^T,  s_t = s_{t-1} + g_t,   n_t = <f_t, s_t>,  o_t = S_t^T f_t / n_t.
           In a chunk:  P_ij = <f_i, g_j> for j <= i,   n = rowsum(P) + F s,   O = diag(1 / n) (P V + F S)
Backward   let e_i = do_i / n_i and r_i = -<do_i, o_i> / n_i, the gradients of the numerator and of n_i. A one
           beside v would make n a column of the numerator, so all follows with (v, 1) and (e,
           r) in place of v, e:
           dP_ij = <e_i, v_j> + r_i for j <= i;   R, t are the gradients of S, s after the chunk:
           dF = dP G + E S^T + r s^T,   dG = dP^T F + V R^T + 1 t^T,   dV = P^T E + G R,
           and before the chunk  R + F^T E  and  t + F^T r;   dq = dF * phi'(q),  dk = dG * phi'(k)

Forward schedule: a program owns (head, tile of value columns) and walks the chunks with its columns of S in
registers. Every tile needs n, and s is one column, so that each tile carries s too: no second pass divides.
Backward schedule: also walks of one program, first forward with S for dq, which needs what comes before, then
back with R for dk and dv. Nothing but inputs, o and n is kept, and no state is ever stored. dv belongs to the
tile; dq and dk are sums over value columns, so each tile has a slot in float32 and a second kernel adds the
slots, where the slope of phi is applied once. The normaliser's part, r, is no tile's own: it needs a row sum
over all value columns, made by a small kernel beforehand, and enters the first tile's slot alone. Few heads
would be few programs, and chunk states in memory the better choice; many heads and a long sequence make this
the lean one.

op: normalised_linear_attention
schedule: chunk_state_pass, reverse_scan, partials_then_reduce, row_reduce_correct
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles, the precision of dots, and warps: products of whole float32 numbers take many registers."""
    single = q.dtype == torch.float32
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": 32,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": 16 if single else 32,
        "num_warps": 8 if single else 4,
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
def load_features(ptr, rows, cols, R, C):
    """phi of a tile, 0 outside, where phi(0) would be 1."""
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    x = tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)
    u = x.to(tl.float32)
    phi = tl.where(u > 0, u + 1.0, tl.exp(tl.where(u > 0, 0.0, u)))
    return tl.where(mask, phi, 0.0).to(x.dtype)


@triton.jit
def causal_product(a, b, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    return tl.where(i[None, :] <= i[:, None], tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, n_ptr, T, D, DV,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    s = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, T, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        f = load_features(q_ptr + head * D, rows, d, T, D)
        g = load_features(k_ptr + head * D, rows, d, T, D)
        v = load_tile(v_ptr + head * DV, rows, e, T, DV)
        P = causal_product(f, g, PRECISION, CHUNK)
        n = tl.sum(P, axis=1) + tl.sum(f.to(tl.float32) * s[None, :], axis=1)
        n = tl.where(rows < T, n, 1.0)
        o = tl.dot(f, state.to(f.dtype), input_precision=PRECISION)
        o = tl.dot(P.to(v.dtype), v, o, input_precision=PRECISION)
        store_tile(o_ptr + head * DV, o / n[:, None], rows, e, T, DV)
        if tl.program_id(0) == 0:
            tl.store(n_ptr + head + rows, n, mask=rows < T)
        state = tl.dot(tl.trans(g), v, state, input_precision=PRECISION)
        s += tl.sum(g.to(tl.float32), axis=0)


def linear_attention_forward(q, k, v):
    B, H, T, D = q.shape
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError("q and k must have one shape, and v its batch, heads and time")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, n = torch.empty_like(v), torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    DV, blocks = v.shape[3], tiling(q)
    attention_kernel[(triton.cdiv(DV, blocks["BLOCK_V"]), B * H)](q, k, v, o, n, T, D, DV, **blocks)
    return o, n


@autodiff(inputs_require_grad=(0, 1, 2))
def normalised_linear_attention(q, k, v):
    """q, k: (B, H, T, D); v: (B, H, T, DV)."""
    return linear_attention_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    f, g = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    P = (f @ g.transpose(-1, -2)).tril()
    return P @ v / P.sum(-1, keepdim=True)


SWEEP = [
    {"B": 8, "H": 16, "T": 1024, "D": 64, "DV": 64},
    {"B": 4, "H": 8, "T": 1021, "D": 96, "DV": 80},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 41, "D": 16, "DV": 36}, {"B": 2, "H": 1, "T": 9, "D": 20, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D, DV = (dims[name] for name in ("B", "H", "T", "D", "DV"))
    q, k = (torch.randn(B, H, T, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(B, H, T, DV, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def r_kernel(o_ptr, do_ptr, n_ptr, r_ptr, rows_total, DV, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    """r = -<do, o> / n of a tile of rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    delta = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, DV, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        o = load_tile(o_ptr, rows, e, rows_total, DV).to(tl.float32)
        delta -= tl.sum(o * load_tile(do_ptr, rows, e, rows_total, DV).to(tl.float32), axis=1)
    n = tl.load(n_ptr + rows, mask=rows < rows_total, other=1.0)
    tl.store(r_ptr + rows, delta / n, mask=rows < rows_total)


@triton.jit
def load_e_r(do_ptr, n_ptr, r_ptr, rows, e, T, DV, first):
    """e of a tile of rows; r in the first tile of value columns, 0 in the others."""
    do = load_tile(do_ptr, rows, e, T, DV)
    n = tl.load(n_ptr + rows, mask=rows < T, other=1.0)
    r = tl.load(r_ptr + rows, mask=(rows < T) & first, other=0.0)
    return (do.to(tl.float32) / n[:, None]).to(do.dtype), r


@triton.jit
def walks_kernel(
    q_ptr, k_ptr, v_ptr, n_ptr, r_ptr, do_ptr, df_ptr, dg_ptr, dv_ptr, T, D, DV,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T
    slot = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * T * D
    first = tl.program_id(0) == 0
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    s = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, T, CHUNK):
        rows = start + i
        g = load_features(k_ptr + head * D, rows, d, T, D)
        v = load_tile(v_ptr + head * DV, rows, e, T, DV)
        E, r = load_e_r(do_ptr + head * DV, n_ptr + head, r_ptr + head, rows, e, T, DV, first)
        dP = tl.dot(E, tl.trans(v), input_precision=PRECISION) + r[:, None]
        dP = tl.where(i[None, :] <= i[:, None], dP, 0.0).to(g.dtype)
        df = tl.dot(E, tl.trans(state.to(E.dtype)), input_precision=PRECISION) + r[:, None] * s[None, :]
        df = tl.dot(dP, g, df, input_precision=PRECISION)
        store_tile(df_ptr + slot, df, rows, d, T, D)
        state = tl.dot(tl.trans(g), v, state, input_precision=PRECISION)
        s += tl.sum(g.to(tl.float32), axis=0)

    grad = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)  # R
    t = tl.zeros([BLOCK_D], dtype=tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for back in range(chunks):
        rows = (chunks - 1 - back) * CHUNK + i
        f = load_features(q_ptr + head * D, rows, d, T, D)
        g = load_features(k_ptr + head * D, rows, d, T, D)
        v = load_tile(v_ptr + head * DV, rows, e, T, DV)
        E, r = load_e_r(do_ptr + head * DV, n_ptr + head, r_ptr + head, rows, e, T, DV, first)
        dP = tl.dot(E, tl.trans(v), input_precision=PRECISION) + r[:, None]
        dP = tl.where(i[None, :] <= i[:, None], dP, 0.0).to(g.dtype)
        dg = tl.dot(v, tl.trans(grad.to(v.dtype)), input_precision=PRECISION) + t[None, :]
        dg = tl.dot(tl.trans(dP), f, dg, input_precision=PRECISION)
        store_tile(dg_ptr + slot, dg, rows, d, T, D)
        P = tl.trans(causal_product(f, g, PRECISION, CHUNK).to(E.dtype))
        dv = tl.dot(g, grad.to(g.dtype), input_precision=PRECISION)
        store_tile(dv_ptr + head * DV, tl.dot(P, E, dv, input_precision=PRECISION), rows, e, T, DV)
        grad = tl.dot(tl.trans(f), E, grad, input_precision=PRECISION)
        t += tl.sum(f.to(tl.float32) * r[:, None], axis=0)


@triton.jit
def features_backward_kernel(slots_ptr, x_ptr, dx_ptr, slots, size, BLOCK: tl.constexpr):
    """The sum of the slots, times the slope of phi at x."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    dx = acc * tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=i < size)


def features_backward(slots, x):
    dx, size = torch.empty_like(x), x.numel()
    features_backward_kernel[(triton.cdiv(size, 256),)](slots, x, dx, slots.shape[0], size, BLOCK=256)
    return dx


class NormalisedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, n = linear_attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, n)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, n = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, D), DV = q.shape, v.shape[3]
        r, dv, blocks = torch.empty_like(n), torch.empty_like(v), tiling(q)
        tiles = triton.cdiv(DV, blocks["BLOCK_V"])
        r_kernel[(triton.cdiv(B * H * T, 32),)](o, do, n, r, B * H * T, DV, BLOCK=32, BLOCK_V=32)
        df, dg = (torch.empty((tiles, *q.shape), device=q.device, dtype=torch.float32) for _ in range(2))
        walks_kernel[(tiles, B * H)](q, k, v, n, r, do, df, dg, dv, T, D, DV, **blocks)
        needs = ctx.needs_input_grad
        dq = features_backward(df, q) if needs[0] else None
        return dq, features_backward(dg, k) if needs[1] else None, dv if needs[2] else None


def normalised_linear_attention_autograd(q, k, v):
    return NormalisedLinearAttention.apply(q, k, v)
