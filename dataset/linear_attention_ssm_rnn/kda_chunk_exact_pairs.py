"""Delta rule with a gate for each channel, by chunks of 16, whose pairs of steps are decayed exactly.

Forward    P_t = diag(e^{g_t}) S_{t-1},  e_t = v_t - P_t^T k_t,  S_t = P_t + b_t k_t e_t^T,  o_t = S_t^T q_t.
           In a chunk, s_i = g_1 + .. + g_i from its start (a row of channels), s the last of them, S the
           state before:  <x, k>_ij = sum_d x_id k_jd e^{s_id - s_jd},   A_ij = b_j <k, k>_ij for j < i,
           M_ij = <q, k>_ij for j <= i,   Kd = K * e^{s_i},  Qd = Q * e^{s_i},  Ke = K * e^{s - s_j},
           (I + A) E = V - Kd S,  N = diag(b) E,   O = Qd S + M N,   S' = diag(e^s) S + Ke^T N
Backward   with R the gradient of S':   dN = M^T dO + Ke R,   Y = (I + A)^{-T} diag(b) dN = dV,
           before the chunk  diag(e^s) R + Qd^T dO - Kd^T Y;   dM = dO N^T for j <= i,
           dA = -Y E^T for j < i,   dQd = dO S^T,  dKd = -Y S^T,  dKe = N R^T,
           db_j = <dN_j, E_j> + sum_i dA_ij <k, k>_ij;   with C_ij = b_j dA_ij:
           dq_i = e^{s_i} * dQd_i + sum_j dM_ij e^{s_i - s_j} * k_j,
           l_i = e^{s_i} * dKd_i + sum_j C_ij e^{s_i - s_j} * k_j   (k as the later of a pair),
           r_j = e^{s - s_j} * dKe_j + sum_i e^{s_i - s_j} * (dM_ij q_i + C_ij k_i)   (as the earlier),
           dk = l + r,   ds_i = q_i * dq_i + k_i * (l_i - r_i),  and dg is the sum of ds from t to the
           chunk's end, plus what s takes:  sum_j Ke_j * dKe_j + e^s * rowsum(S * R)

Forward schedule: with a decay a channel, <x, k> is no product of matrices scaled by rows, and to split
e^{s_i - s_j} into e^{s_i} and e^{-s_j} would overflow. A chunk is 16 steps, so that a loop over j makes the
pairs as they stand, with exponents never above 0, for about the work of one step of the recurrence. That and
the inverse are made for all chunks at once; a walk over the chunks is then four small dots a step.
Backward schedule: the walk from right to left has the same shape, its tiles of value columns apart, and
stores R and dV. All else is the chunks' own, in parallel: a program sums over the value columns what the
states give, then runs the loop over j once more, for q, k, b and the gates together, as they share its
exponentials. ds cancels in part; the sums end with the chunk, so that rounding does not grow with T.

op: kimi_delta_attention
schedule: chunk_state_pass, adjoint_solve, reverse_scan, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 16


def tiling(q):
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": 32,
        "num_warps": 8 if q.dtype == torch.float32 else 4,
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
def load_gates(g_ptr, rows, d, T, DK):
    """s_i of the chunk's rows, and s; steps past T have gates of 0."""
    g = load_tile(g_ptr, rows, d, T, DK).to(tl.float32)
    return tl.cumsum(g, axis=0), tl.sum(g, axis=0)


@triton.jit
def row_of(x, i, j):
    return tl.sum(tl.where(i[:, None] == j, x, 0.0), axis=0)


@triton.jit
def column_of(x, i, j):
    return tl.sum(tl.where(i[None, :] == j, x, 0.0), axis=1)


@triton.jit
def decayed_key(k, sums, i, j):
    """e^{s_i - s_j} * k_j for the rows i >= j, 0 above."""
    later = i[:, None] >= j
    decay = tl.exp(tl.where(later, sums - row_of(sums, i, j)[None, :], 0.0))
    return tl.where(later, decay * row_of(k, i, j)[None, :], 0.0)


@triton.jit
def pairs_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, inverse_ptr, m_ptr, T, DK, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(I + A)^{-1} and M of every chunk."""
    head = tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * CHUNK + i
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
    sums, _ = load_gates(g_ptr + head * T * DK, rows, d, T, DK)
    beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
    A = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    M = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for j in range(CHUNK):
        key = decayed_key(k, sums, i, j)
        A += tl.where(i[None, :] == j, tl.sum(k * key, axis=1)[:, None], 0.0)
        M += tl.where(i[None, :] == j, tl.sum(q * key, axis=1)[:, None], 0.0)
    A = tl.where(i[None, :] < i[:, None], A * beta[None, :], 0.0)
    inverse = tl.where(i[None, :] == i[:, None], 1.0, 0.0)
    for row in range(1, CHUNK):  # row of the inverse = e_row - sum_j A_row,j (row j of the inverse)
        above = tl.sum(row_of(A, i, row)[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == row, above[None, :], 0.0)
    place = (head * tl.num_programs(0) + tl.program_id(0)) * CHUNK * CHUNK
    store_tile(inverse_ptr + place, inverse, i, i, CHUNK, CHUNK)
    store_tile(m_ptr + place, M, i, i, CHUNK, CHUNK)


@triton.jit
def walk_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, inverse_ptr, m_ptr, o_ptr, e_ptr, state_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = q_ptr.dtype.element_ty
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for chunk in range(chunks):
        store_tile(state_ptr + (head * chunks + chunk) * DK * DV, state, d, c, DK, DV)
        rows = chunk * CHUNK + i
        q = load_tile(q_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
        v = load_tile(v_ptr + head * T * DV, rows, c, T, DV).to(tl.float32)
        sums, total = load_gates(g_ptr + head * T * DK, rows, d, T, DK)
        beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
        place = (head * chunks + chunk) * CHUNK * CHUNK
        inverse = load_tile(inverse_ptr + place, i, i, CHUNK, CHUNK)
        M = load_tile(m_ptr + place, i, i, CHUNK, CHUNK)
        known = tl.dot((k * tl.exp(sums)).to(dtype), state.to(dtype), input_precision=PRECISION)
        E = tl.dot(inverse, v - known, input_precision=PRECISION)
        N = (beta[:, None] * E).to(dtype)
        o = tl.dot((q * tl.exp(sums)).to(dtype), state.to(dtype), input_precision=PRECISION)
        store_tile(
            o_ptr + head * T * DV, tl.dot(M.to(dtype), N, o, input_precision=PRECISION), rows, c, T, DV
        )
        store_tile(e_ptr + head * T * DV, E, rows, c, T, DV)
        to_end = tl.trans((k * tl.exp(total[None, :] - sums)).to(dtype))
        state = tl.dot(to_end, N, state * tl.exp(total)[:, None], input_precision=PRECISION)


def kda_forward(q, k, v, beta, g):
    (B, H, T, DK), DV = q.shape, v.shape[3]
    if not q.shape == k.shape == g.shape or v.shape[:3] != q.shape[:3] or beta.shape != q.shape[:3]:
        raise ValueError("q, k and g must have one shape, and v and beta its batch, heads and time")
    if DK > 128:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    chunks, tiles = triton.cdiv(T, CHUNK), tiling(q)
    o = torch.empty_like(v)
    e = torch.empty(v.shape, device=v.device, dtype=torch.float32)
    inverse, m = (e.new_empty((B, H, chunks, CHUNK, CHUNK)) for _ in range(2))
    state = e.new_empty((B, H, chunks, DK, DV))
    pairs_kernel[(chunks, B * H)](q, k, beta, g, inverse, m, T, DK, CHUNK=CHUNK, BLOCK_K=tiles["BLOCK_K"])
    walk_kernel[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
        q, k, v, beta, g, inverse, m, o, e, state, T, DK, DV, chunks, **tiles
    )
    return o, e, inverse, m, state


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def kimi_delta_attention(q, k, v, beta, g):
    """q, k, g: (B, H, T, DK), k of about unit length, g <= 0; v: (B, H, T, DV); beta: (B, H, T)."""
    return kda_forward(*(tensor.contiguous() for tensor in (q, k, v, beta, g)))[0]


def reference(q, k, v, beta, g):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = g[:, :, t, :, None].exp() * state
        error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(2)
        state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * error[:, :, None, :]
        steps.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 1, "H": 32, "T": 2048, "DK": 128, "DV": 128},
    {"B": 2, "H": 4, "T": 1021, "DK": 64, "DV": 96},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 39, "DK": 16, "DV": 20}, {"B": 2, "H": 1, "T": 16, "DK": 11, "DV": 36}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    beta = torch.rand(B, H, T, device=device, dtype=dtype)
    return q, k, v, beta, torch.nn.functional.logsigmoid(2 + torch.randn_like(k))


# ---- backward ----


@triton.jit
def load_n_gradient(m, to_end, do, R, PRECISION: tl.constexpr):
    """dN = M^T dO + Ke R."""
    dN = tl.dot(to_end, R.to(to_end.dtype), input_precision=PRECISION)
    return tl.dot(tl.trans(m).to(do.dtype), do, dN, input_precision=PRECISION)


@triton.jit
def walk_backward_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, inverse_ptr, m_ptr, do_ptr, dv_ptr, r_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = q_ptr.dtype.element_ty
    R = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        store_tile(r_ptr + (head * chunks + chunk) * DK * DV, R, d, c, DK, DV)
        rows = chunk * CHUNK + i
        q = load_tile(q_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
        do = load_tile(do_ptr + head * T * DV, rows, c, T, DV)
        sums, total = load_gates(g_ptr + head * T * DK, rows, d, T, DK)
        beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
        place = (head * chunks + chunk) * CHUNK * CHUNK
        inverse = load_tile(inverse_ptr + place, i, i, CHUNK, CHUNK)
        M = load_tile(m_ptr + place, i, i, CHUNK, CHUNK)
        to_end = (k * tl.exp(total[None, :] - sums)).to(dtype)
        dN = load_n_gradient(M, to_end, do, R, PRECISION)
        Y = tl.dot(tl.trans(inverse), beta[:, None] * dN, input_precision=PRECISION)
        store_tile(dv_ptr + head * T * DV, Y, rows, c, T, DV)
        R *= tl.exp(total)[:, None]
        R = tl.dot(tl.trans((q * tl.exp(sums)).to(dtype)), do, R, input_precision=PRECISION)
        R = tl.dot(tl.trans((-k * tl.exp(sums)).to(dtype)), Y.to(dtype), R, input_precision=PRECISION)


@triton.jit
def chunk_backward_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, m_ptr, e_ptr, state_ptr, r_ptr, do_ptr, y_ptr,
    dq_ptr, dk_ptr, dbeta_ptr, dg_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * CHUNK + i
    dtype = q_ptr.dtype.element_ty
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
    sums, total = load_gates(g_ptr + head * T * DK, rows, d, T, DK)
    beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
    M = load_tile(m_ptr + (head * chunks + tl.program_id(0)) * CHUNK * CHUNK, i, i, CHUNK, CHUNK)
    to_end = k * tl.exp(total[None, :] - sums)
    place = (head * chunks + tl.program_id(0)) * DK * DV
    dM = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dQd = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dKd = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dKe = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    crossing = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, DV, BLOCK_V):
        c = start + tl.arange(0, BLOCK_V)
        S = load_tile(state_ptr + place, d, c, DK, DV)
        R = load_tile(r_ptr + place, d, c, DK, DV)
        crossing += tl.sum(S * R, axis=1)
        E = load_tile(e_ptr + head * T * DV, rows, c, T, DV)
        do = load_tile(do_ptr + head * T * DV, rows, c, T, DV)
        Y = load_tile(y_ptr + head * T * DV, rows, c, T, DV)
        dbeta += tl.sum(load_n_gradient(M, to_end.to(dtype), do, R, PRECISION) * E, axis=1)
        N = (beta[:, None] * E).to(dtype)
        dM = tl.dot(do, tl.trans(N), dM, input_precision=PRECISION)
        dA = tl.dot(-Y, tl.trans(E.to(dtype)), dA, input_precision=PRECISION)
        dQd = tl.dot(do, tl.trans(S.to(dtype)), dQd, input_precision=PRECISION)
        dKd = tl.dot(-Y, tl.trans(S.to(dtype)), dKd, input_precision=PRECISION)
        dKe = tl.dot(N, tl.trans(R.to(dtype)), dKe, input_precision=PRECISION)
    dA = tl.where(i[None, :] < i[:, None], dA, 0.0)

    dq, left = tl.exp(sums) * dQd, tl.exp(sums) * dKd
    right = tl.exp(total[None, :] - sums) * dKe
    for j in range(CHUNK):
        key = decayed_key(k, sums, i, j)
        later = i[:, None] >= j
        decay = tl.where(later, tl.exp(tl.where(later, sums - row_of(sums, i, j)[None, :], 0.0)), 0.0)
        dm, da = column_of(dM, i, j), column_of(dA, i, j)
        dpair = da * tl.sum(tl.where(i == j, beta, 0.0), axis=0)
        dq += dm[:, None] * key
        left += dpair[:, None] * key
        own = tl.sum(decay * (dm[:, None] * q + dpair[:, None] * k), axis=0)
        right += tl.where(i[:, None] == j, own[None, :], 0.0)
        dbeta += tl.where(i == j, tl.sum(da * tl.sum(k * key, axis=1), axis=0), 0.0)
    store_tile(dq_ptr + head * T * DK, dq, rows, d, T, DK)
    store_tile(dk_ptr + head * T * DK, left + right, rows, d, T, DK)
    tl.store(dbeta_ptr + head * T + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < T)
    tail = tl.sum(to_end * dKe, axis=0) + tl.exp(total) * crossing
    dg = tl.cumsum(q * dq + k * (left - right), axis=0, reverse=True) + tail[None, :]
    store_tile(dg_ptr + head * T * DK, dg, rows, d, T, DK)


class KimiDeltaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, beta, g = (tensor.contiguous() for tensor in inputs)
        o, *kept = kda_forward(q, k, v, beta, g)
        ctx.save_for_backward(q, k, beta, g, *kept)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, beta, g, e, inverse, m, state = ctx.saved_tensors
        (B, H, T, DK), DV, chunks, tiles = q.shape, do.shape[3], m.shape[2], tiling(q)
        do, needs, r = do.contiguous(), ctx.needs_input_grad, torch.empty_like(state)
        dq, dk, dv, dbeta, dg = (torch.empty_like(tensor) for tensor in (q, k, do, beta, g))
        walk_backward_kernel[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
            q, k, beta, g, inverse, m, do, dv, r, T, DK, DV, chunks, **tiles
        )
        if needs[0] or needs[1] or needs[3] or needs[4]:
            chunk_backward_kernel[(chunks, B * H)](
                q, k, beta, g, m, e, state, r, do, dv, dq, dk, dbeta, dg, T, DK, DV, chunks, **tiles
            )
        grads = zip((dq, dk, dv, dbeta, dg), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def kimi_delta_attention_autograd(q, k, v, beta, g):
    return KimiDeltaAttention.apply(q, k, v, beta, g)
