"""Gated delta rule by chunks: a gate a head and step, the chunk's system solved inside the walk.

Forward    P_t = e^{g_t} S_{t-1},  e_t = v_t - P_t^T k_t,  S_t = P_t + b_t k_t e_t^T,  o_t = S_t^T q_t.
           In a chunk, s_i = g_1 + .. + g_i from its start, s the last of them, S the state before it,
           L_ij = e^{s_i - s_j}:   (I + A) E = V - diag(e^{s_i}) K S,   A_ij = b_j L_ij <k_i, k_j> for j < i,
           with T = (I + A)^{-1}:  E = T (V - diag(e^{s_i}) K S),   N = diag(b) E,
           O = diag(e^{s_i}) Q S + P N,   P_ij = L_ij <q_i, k_j> for j <= i,
           S' = e^s S + K^T diag(e^{s - s_j}) N
Backward   with R the gradient of S':   dN = P^T dO + diag(e^{s - s_j}) K R,   dV = T^T diag(b) dN,
           and before the chunk  e^s R + Q^T diag(e^{s_i}) dO - K^T diag(e^{s_i}) dV.
           dP = dO N^T for j <= i;  E solves a system, so dA = -dV E^T for j < i, and dT is never made.
           dQ = diag(e^{s_i}) dO S^T + (dP * L) K,     B = dA * L diag(b),
           dK = diag(e^{s - s_j}) N R^T + (dP * L)^T Q - diag(e^{s_i}) dV S^T + B K + B^T K,
           db_j = <dN_j, e_j> + sum_i dA_ij L_ij <k_i, k_j>.
           Gates: s_i multiplies what is read at i and divides what is written at i. With C = dP * P + dA * A,
           u_i = e^{s_i} (<q_i, S do_i> - <k_i, S dv_i>) and w_j = e^{s - s_j} <k_j, R n_j>:
           ds_i = rowsum(C)_i - colsum(C)_i + u_i - w_i,  and dg_t is the sum of ds from t to the chunk's end
           plus <R, S'>, for all its gates scale the state that leaves it

Forward schedule: T of every chunk in parallel; then a walk of three products a step for each tile of value
columns, which stores S and E; then outputs of all chunks in parallel. Only differences of s with j <= i are
exponentiated.
Backward schedule: mirrored. P^T dO is prepared in parallel, the walk from right to left makes dN and, by the
transposed solve, dV itself, and stores R. S and E are kept from the forward, so no walk is repeated. Then the
owner of a chunk has all in hand: rowsum(C) - colsum(C) needs no more than the two tiles that dQ and dK need
anyway, and summing it within a chunk, with <R, S'> made anew at its end, keeps dg free of the rounding that a
suffix sum over all time would gather. Prepared W and U, as an ungated rule may have them, would save a
product of the walk for two more tensors as large as the keys and values.

op: gated_delta_rule
schedule: chunk_state_pass, adjoint_solve, reverse_scan, swap_owner
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(k):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    single = k.dtype == torch.float32
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": 32 if single else 64,
        "BLOCK_K": max(16, triton.next_power_of_2(k.shape[3])),
        "BLOCK_V": 16 if single else 32,
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
def load_beta(beta_ptr, rows, T):
    return tl.load(beta_ptr + rows, mask=rows < T, other=0.0).to(tl.float32)


@triton.jit
def load_gates(g_ptr, rows, T):
    """s_i of the chunk's rows, and s; rows past T have a gate of 0, so that s is the last row's."""
    g = tl.load(g_ptr + rows, mask=rows < T, other=0.0).to(tl.float32)
    return tl.cumsum(g, axis=0), tl.sum(g, axis=0)


@triton.jit
def decayed_product(a, b, sums, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """L_ij <a_i, b_j> for j <= i, 0 elsewhere."""
    i = tl.arange(0, CHUNK)
    decay = tl.exp(tl.where(i[None, :] <= i[:, None], sums[:, None] - sums[None, :], -float("inf")))
    return tl.dot(a, tl.trans(b), input_precision=PRECISION) * decay


@triton.jit
def scale_rows(tile, weight):
    return (tile.to(tl.float32) * weight[:, None]).to(tile.dtype)


@triton.jit
def inverse_kernel(
    k_ptr, beta_ptr, g_ptr, inverse_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(I + A)^{-1} of a chunk; for rows past T it is the identity."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    k = load_tile(k_ptr + head * T * DK, c * CHUNK + i, tl.arange(0, BLOCK_K), T, DK)
    sums, _ = load_gates(g_ptr + head * T, c * CHUNK + i, T)
    beta = load_beta(beta_ptr + head * T, c * CHUNK + i, T)
    A = tl.where(i[None, :] < i[:, None], decayed_product(k, k, sums, PRECISION, CHUNK) * beta[None, :], 0.0)
    inverse = tl.where(i[None, :] == i[:, None], 1.0, 0.0)
    for row in range(1, CHUNK):  # row of T = e_row - sum_j A_row,j T_j, from rows that are done
        a = tl.sum(tl.where(i[:, None] == row, A, 0.0), axis=0)
        below = tl.sum(a[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == row, below[None, :], 0.0)
    store_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, inverse, i, i, CHUNK, CHUNK)


@triton.jit
def state_kernel(
    k_ptr, v_ptr, beta_ptr, g_ptr, inverse_ptr, state_ptr, e_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S before each chunk, and E of each."""
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for c in range(chunks):
        store_tile(state_ptr + (head * chunks + c) * DK * DV, state, d, cols, DK, DV)
        rows = c * CHUNK + i
        sums, total = load_gates(g_ptr + head * T, rows, T)
        beta = load_beta(beta_ptr + head * T, rows, T)
        inverse = load_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, i, i, CHUNK, CHUNK)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
        e = load_tile(v_ptr + head * T * DV, rows, cols, T, DV).to(tl.float32)
        e -= tl.dot(k, state.to(k.dtype), input_precision=PRECISION) * tl.exp(sums)[:, None]
        e = tl.dot(inverse.to(k.dtype), e.to(k.dtype), input_precision=PRECISION)
        store_tile(e_ptr + head * T * DV, e, rows, cols, T, DV)
        n = (e * (beta * tl.exp(total - sums))[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), n, state * tl.exp(total), input_precision=PRECISION)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, state_ptr, e_ptr, o_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    sums, _ = load_gates(g_ptr + head * T, rows, T)
    beta = load_beta(beta_ptr + head * T, rows, T)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    P = (decayed_product(q, k, sums, PRECISION, CHUNK) * beta[None, :]).to(q.dtype)  # O = .. + P diag(b) E
    q = scale_rows(q, tl.exp(sums))
    for start in range(0, DV, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        state = load_tile(state_ptr + (head * chunks + c) * DK * DV, d, cols, DK, DV).to(q.dtype)
        o = tl.dot(q, state, input_precision=PRECISION)
        e = load_tile(e_ptr + head * T * DV, rows, cols, T, DV)
        o = tl.dot(P, e, o, input_precision=PRECISION)
        store_tile(o_ptr + head * T * DV, o, rows, cols, T, DV)


def gated_delta_forward(q, k, v, beta, g):
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or not beta.shape == g.shape == q.shape[:3]:
        raise ValueError("q and k, v, beta and g must agree in batch, heads and time")
    (B, H, T, DK), DV, tiles = q.shape, v.shape[3], tiling(k)
    if DK > 128:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    CHUNK = tiles["CHUNK"]
    chunks = triton.cdiv(T, CHUNK)
    sizes = (T, DK, DV, chunks)
    inverse = torch.empty((B, H, chunks, CHUNK, CHUNK), device=k.device, dtype=torch.float32)
    state = torch.empty((B, H, chunks, DK, DV), device=k.device, dtype=torch.float32)
    e, o = torch.empty_like(v), torch.empty_like(v)
    inverse_kernel[(chunks, B * H)](k, beta, g, inverse, *sizes, **tiles)
    state_kernel[(B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](
        k, v, beta, g, inverse, state, e, *sizes, **tiles
    )
    output_kernel[(chunks, B * H)](q, k, beta, g, state, e, o, *sizes, **tiles)
    return o, inverse, state, e


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def gated_delta_rule(q, k, v, beta, g):
    """q, k: (B, H, T, DK); v: (B, H, T, DV); beta, g: (B, H, T), g the logarithm of the gate, at most 0."""
    return gated_delta_forward(*(tensor.contiguous() for tensor in (q, k, v, beta, g)))[0]


def reference(q, k, v, beta, g):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = g[:, :, t, None, None].exp() * state
        error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(2)
        state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * error[:, :, None, :]
        steps.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 2, "H": 16, "T": 2048, "DK": 128, "DV": 128},
    {"B": 1, "H": 8, "T": 1021, "DK": 64, "DV": 96},
]
SWEEP_CPU = [{"B": 1, "H": 1, "T": 40, "DK": 16, "DV": 20}, {"B": 1, "H": 2, "T": 9, "DK": 20, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    beta = torch.rand(B, H, T, device=device, dtype=dtype)
    return q, k, v, beta, torch.nn.functional.logsigmoid(3 + torch.randn_like(beta))


# ---- backward ----


@triton.jit
def local_kernel(
    q_ptr, k_ptr, g_ptr, do_ptr, local_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """P^T dO, what a chunk's own outputs add to dN."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    sums, _ = load_gates(g_ptr + head * T, rows, T)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    P = tl.trans(decayed_product(q, k, sums, PRECISION, CHUNK).to(q.dtype))
    for start in range(0, DV, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr + head * T * DV, rows, cols, T, DV)
        store_tile(local_ptr + head * T * DV, tl.dot(P, do, input_precision=PRECISION), rows, cols, T, DV)


@triton.jit(do_not_specialize=["DV"])  # with DV = 1 as a constant, Triton 3.6 mixes R up
def state_backward_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, inverse_ptr, do_ptr, local_ptr, r_ptr, dn_ptr, dv_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """R after each chunk, dN and dV of each."""
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for back in range(chunks):
        c = chunks - 1 - back
        store_tile(r_ptr + (head * chunks + c) * DK * DV, r, d, cols, DK, DV)
        rows = c * CHUNK + i
        sums, total = load_gates(g_ptr + head * T, rows, T)
        beta = load_beta(beta_ptr + head * T, rows, T)
        inverse = load_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, i, i, CHUNK, CHUNK)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
        dn = tl.dot(k, r.to(k.dtype), input_precision=PRECISION) * tl.exp(total - sums)[:, None]
        dn += load_tile(local_ptr + head * T * DV, rows, cols, T, DV).to(tl.float32)
        store_tile(dn_ptr + head * T * DV, dn, rows, cols, T, DV)
        dn = (dn * beta[:, None]).to(k.dtype)
        dv = tl.dot(tl.trans(inverse.to(k.dtype)), dn, input_precision=PRECISION)
        store_tile(dv_ptr + head * T * DV, dv, rows, cols, T, DV)
        dv = (dv * tl.exp(sums)[:, None]).to(k.dtype)
        r = r * tl.exp(total) - tl.dot(tl.trans(k), dv, input_precision=PRECISION)
        q = scale_rows(load_tile(q_ptr + head * T * DK, rows, d, T, DK), tl.exp(sums))
        do = load_tile(do_ptr + head * T * DV, rows, cols, T, DV)
        r = tl.dot(tl.trans(q), do, r, input_precision=PRECISION)


@triton.jit(do_not_specialize=["DV"])  # with DV = 1 as a constant, Triton 3.6 mixes R up
def chunk_backward_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, state_ptr, e_ptr, r_ptr, dn_ptr, dv_ptr, do_ptr,
    dq_ptr, dk_ptr, dbeta_ptr, dg_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    rows = c * CHUNK + i
    d = tl.arange(0, BLOCK_K)
    next_chunk = tl.minimum(c + 1, chunks - 1)  # past the last one R is zero
    dP = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    x = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)  # dV S^T
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    crossing = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, DV, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr + head * T * DV, rows, cols, T, DV)
        e = load_tile(e_ptr + head * T * DV, rows, cols, T, DV)
        dn = load_tile(dn_ptr + head * T * DV, rows, cols, T, DV)
        dv = load_tile(dv_ptr + head * T * DV, rows, cols, T, DV)
        after = load_tile(state_ptr + (head * chunks + next_chunk) * DK * DV, d, cols, DK, DV)
        r = load_tile(r_ptr + (head * chunks + c) * DK * DV, d, cols, DK, DV)
        crossing += tl.sum(r * after, axis=1)
        dbeta += tl.sum(dn.to(tl.float32) * e.to(tl.float32), axis=1)
        dP = tl.dot(do, tl.trans(e), dP, input_precision=PRECISION)
        dA = tl.dot(dv, tl.trans(e), dA, input_precision=PRECISION)
        dk = tl.dot(e, tl.trans(r.to(e.dtype)), dk, input_precision=PRECISION)
        state = load_tile(state_ptr + (head * chunks + c) * DK * DV, d, cols, DK, DV).to(do.dtype)
        dq = tl.dot(do, tl.trans(state), dq, input_precision=PRECISION)
        x = tl.dot(dv, tl.trans(state), x, input_precision=PRECISION)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    sums, total = load_gates(g_ptr + head * T, rows, T)
    beta = load_beta(beta_ptr + head * T, rows, T)
    dq *= tl.exp(sums)[:, None]
    x *= tl.exp(sums)[:, None]
    dk *= (beta * tl.exp(total - sums))[:, None]
    ds = tl.sum(q.to(tl.float32) * dq - k.to(tl.float32) * (x + dk), axis=1)  # u_i - w_i

    decay = tl.exp(tl.where(i[None, :] <= i[:, None], sums[:, None] - sums[None, :], -float("inf")))
    dP = dP * decay * beta[None, :]
    dA = tl.where(i[None, :] < i[:, None], -dA * decay, 0.0)
    keys = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    C = dA * keys
    dbeta += tl.sum(C, axis=0)
    tl.store(dbeta_ptr + head * T + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < T)
    C = C * beta[None, :] + dP * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    ds += tl.sum(C, axis=1) - tl.sum(C, axis=0)
    dg = tl.sum(crossing, axis=0) + tl.cumsum(ds, axis=0, reverse=True)
    tl.store(dg_ptr + head * T + rows, dg.to(dg_ptr.dtype.element_ty), mask=rows < T)

    dP = dP.to(k.dtype)
    store_tile(dq_ptr + head * T * DK, tl.dot(dP, k, dq, input_precision=PRECISION), rows, d, T, DK)
    dA = (dA * beta[None, :]).to(k.dtype)
    dk = tl.dot(tl.trans(dP), q, dk - x, input_precision=PRECISION)
    dk = tl.dot(dA, k, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dA), k, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * T * DK, dk, rows, d, T, DK)


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, beta, g = (tensor.contiguous() for tensor in inputs)
        o, inverse, state, e = gated_delta_forward(q, k, v, beta, g)
        ctx.save_for_backward(q, k, beta, g, inverse, state, e)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, beta, g, inverse, state, e = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, DK), DV, tiles = q.shape, do.shape[3], tiling(k)
        chunks = state.shape[2]
        sizes = (T, DK, DV, chunks)
        r, local, dn, dv = torch.empty_like(state), *(torch.empty_like(do) for _ in range(3))
        local_kernel[(chunks, B * H)](q, k, g, do, local, *sizes, **tiles)
        state_backward_kernel[(B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](
            q, k, beta, g, inverse, do, local, r, dn, dv, *sizes, **tiles
        )
        dq, dk, dbeta, dg = (torch.empty_like(tensor) for tensor in (q, k, beta, g))
        chunk_backward_kernel[(chunks, B * H)](
            q, k, beta, g, state, e, r, dn, dv, do, dq, dk, dbeta, dg, *sizes, **tiles, num_warps=8
        )
        grads = zip((dq, dk, dv, dbeta, dg), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def gated_delta_rule_autograd(q, k, v, beta, g):
    return GatedDeltaRule.apply(q, k, v, beta, g)
