"""Delta rule by chunks: the triangular system of a chunk is solved once, in parallel, before time is walked.

Forward    S_t = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T,  o_t = S_t^T q_t.  In a chunk, with S the state
           before it, step i really writes n_i = b_i (v_i - S^T k_i - sum_{j < i} n_j <k_j, k_i>), that is
           (I + A) N = diag(b) (V - K S),   A_ij = b_i <k_i, k_j> for j < i, 0 elsewhere.  So with
           T = (I + A)^{-1},  W = T diag(b) K,  U = T diag(b) V:
           N = U - W S,   S' = S + K^T N,   O = Q S + P N,   P_ij = <q_i, k_j> for j <= i
Backward   with R the gradient of S':  dN = P^T dO + K R, and before the chunk  R + Q^T dO - W^T dN;
           dP = dO N^T for j <= i.  N solves a system, so Y = T^T dN is the gradient of its right side and
           dA = -Y N^T for j < i; neither dT nor dW nor dU is needed. With X = Y S^T:
           dQ = dO S^T + dP K,      dK = N R^T + dP^T Q + diag(b) (dA K - X) + dA^T diag(b) K,
           dV = diag(b) Y,          db_i = <Y_i, v_i> - <X_i, k_i> + sum_j dA_ij <k_i, k_j>

Forward schedule: T, W and U of every chunk are made in parallel. A walk over the chunks then has two products
a step, by programs of their own for each tile of value columns, which never mix; it stores S and N, from
which every chunk makes its outputs in parallel.
Backward schedule: of all that only T is kept, one chunk length of numbers a token; W, U, S and N are made
from it again, S alone being several times as large as the inputs. The walk from right to left is as lean as
the forward's: P^T dO is prepared outside, three products a step are left, and R and dN are stored. Then the
owner of a chunk makes all its gradients, each stored once. The states pass through its hands by tiles of
value columns, over which dQ, dK, dP, dA and X are sums.

op: delta_rule
schedule: chunk_state_pass, adjoint_solve, reverse_scan, recompute_from_stats
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
def inverse_kernel(
    k_ptr, beta_ptr, inverse_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(I + A)^{-1} of a chunk. Rows past T have a beta of 0, so there it is the identity."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    k = load_tile(k_ptr + head * T * DK, c * CHUNK + i, tl.arange(0, BLOCK_K), T, DK)
    beta = load_beta(beta_ptr + head * T, c * CHUNK + i, T)
    A = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None]
    A = tl.where(i[None, :] < i[:, None], A, 0.0)
    inverse = tl.where(i[None, :] == i[:, None], 1.0, 0.0)
    for row in range(1, CHUNK):  # row of T = e_row - sum_j A_row,j T_j, from rows that are done
        a = tl.sum(tl.where(i[:, None] == row, A, 0.0), axis=0)
        below = tl.sum(a[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == row, below[None, :], 0.0)
    store_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, inverse, i, i, CHUNK, CHUNK)


@triton.jit
def wy_kernel(
    k_ptr, v_ptr, beta_ptr, inverse_ptr, w_ptr, u_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    rows = c * CHUNK + i
    inverse = load_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, i, i, CHUNK, CHUNK)
    scaled = (inverse * load_beta(beta_ptr + head * T, rows, T)[None, :]).to(k_ptr.dtype.element_ty)
    for start in range(0, DK, BLOCK_V):
        d = start + tl.arange(0, BLOCK_V)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
        store_tile(w_ptr + head * T * DK, tl.dot(scaled, k, input_precision=PRECISION), rows, d, T, DK)
    for start in range(0, DV, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        v = load_tile(v_ptr + head * T * DV, rows, e, T, DV)
        store_tile(u_ptr + head * T * DV, tl.dot(scaled, v, input_precision=PRECISION), rows, e, T, DV)


@triton.jit
def state_kernel(
    k_ptr, w_ptr, u_ptr, state_ptr, n_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S before each chunk, and N of each."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for c in range(chunks):
        store_tile(state_ptr + (head * chunks + c) * DK * DV, state, d, e, DK, DV)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
        w = load_tile(w_ptr + head * T * DK, rows, d, T, DK)
        n = load_tile(u_ptr + head * T * DV, rows, e, T, DV).to(tl.float32)
        n -= tl.dot(w, state.to(w.dtype), input_precision=PRECISION)
        store_tile(n_ptr + head * T * DV, n, rows, e, T, DV)
        state = tl.dot(tl.trans(k), n.to(k.dtype), state, input_precision=PRECISION)


@triton.jit
def causal_product(a, b, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    return tl.where(i[None, :] <= i[:, None], tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, state_ptr, n_ptr, o_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    P = causal_product(q, k, PRECISION, CHUNK).to(q.dtype)
    for start in range(0, DV, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        state = load_tile(state_ptr + (head * chunks + c) * DK * DV, d, e, DK, DV).to(q.dtype)
        o = tl.dot(q, state, input_precision=PRECISION)
        n = load_tile(n_ptr + head * T * DV, rows, e, T, DV)
        o = tl.dot(P, n, o, input_precision=PRECISION)
        store_tile(o_ptr + head * T * DV, o, rows, e, T, DV)


def chunk_states(k, v, beta, inverse):
    """W, N and the states before the chunks."""
    (B, H, T, DK), DV, tiles = k.shape, v.shape[3], tiling(k)
    chunks = inverse.shape[2]
    sizes = (T, DK, DV, chunks)
    w, u, n = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    state = torch.empty((B, H, chunks, DK, DV), device=k.device, dtype=torch.float32)
    wy_kernel[(chunks, B * H)](k, v, beta, inverse, w, u, *sizes, **tiles)
    state_kernel[(B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](k, w, u, state, n, *sizes, **tiles)
    return w, n, state


def delta_rule_forward(q, k, v, beta):
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or beta.shape != q.shape[:3]:
        raise ValueError("q and k, v and beta must agree in batch, heads and time")
    (B, H, T, DK), DV, tiles = q.shape, v.shape[3], tiling(k)
    if DK > 128:
        raise ValueError(f"key dimension {DK} does not fit one tile")
    chunks = triton.cdiv(T, tiles["CHUNK"])
    inverse = torch.empty(
        (B, H, chunks, tiles["CHUNK"], tiles["CHUNK"]), device=k.device, dtype=torch.float32
    )
    inverse_kernel[(chunks, B * H)](k, beta, inverse, T, DK, DV, chunks, **tiles)
    _, n, state = chunk_states(k, v, beta, inverse)
    o = torch.empty_like(v)
    output_kernel[(chunks, B * H)](q, k, state, n, o, T, DK, DV, chunks, **tiles)
    return o, inverse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def delta_rule(q, k, v, beta):
    """q, k: (B, H, T, DK); v: (B, H, T, DV); beta: (B, H, T). Keys of about unit length."""
    return delta_rule_forward(*(tensor.contiguous() for tensor in (q, k, v, beta)))[0]


def reference(q, k, v, beta):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
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
    return q, k, v, torch.rand(B, H, T, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def local_kernel(
    q_ptr, k_ptr, do_ptr, local_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """P^T dO, what a chunk's own outputs add to dN."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    P = tl.trans(causal_product(q, k, PRECISION, CHUNK).to(q.dtype))
    for start in range(0, DV, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr + head * T * DV, rows, e, T, DV)
        store_tile(local_ptr + head * T * DV, tl.dot(P, do, input_precision=PRECISION), rows, e, T, DV)


@triton.jit
def state_backward_kernel(
    q_ptr, k_ptr, w_ptr, do_ptr, local_ptr, r_ptr, dn_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """R after each chunk, and dN of each."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    for back in range(chunks):
        c = chunks - 1 - back
        store_tile(r_ptr + (head * chunks + c) * DK * DV, r, d, e, DK, DV)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
        dn = load_tile(local_ptr + head * T * DV, rows, e, T, DV).to(tl.float32)
        dn = tl.dot(k, r.to(k.dtype), dn, input_precision=PRECISION)
        store_tile(dn_ptr + head * T * DV, dn, rows, e, T, DV)
        q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
        do = load_tile(do_ptr + head * T * DV, rows, e, T, DV)
        r = tl.dot(tl.trans(q), do, r, input_precision=PRECISION)
        w = load_tile(w_ptr + head * T * DK, rows, d, T, DK)
        r -= tl.dot(tl.trans(w), dn.to(w.dtype), input_precision=PRECISION)


@triton.jit
def chunk_backward_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, inverse_ptr, n_ptr, state_ptr, r_ptr, dn_ptr, do_ptr,
    dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    rows = c * CHUNK + i
    d = tl.arange(0, BLOCK_K)
    beta = load_beta(beta_ptr + head * T, rows, T)
    inverse = load_tile(inverse_ptr + (head * chunks + c) * CHUNK * CHUNK, i, i, CHUNK, CHUNK)
    inverse = tl.trans(inverse.to(k_ptr.dtype.element_ty))
    dP = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    x = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    for start in range(0, DV, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr + head * T * DV, rows, e, T, DV)
        n = load_tile(n_ptr + head * T * DV, rows, e, T, DV)
        dn = load_tile(dn_ptr + head * T * DV, rows, e, T, DV)
        v = load_tile(v_ptr + head * T * DV, rows, e, T, DV)
        state = load_tile(state_ptr + (head * chunks + c) * DK * DV, d, e, DK, DV).to(do.dtype)
        r = load_tile(r_ptr + (head * chunks + c) * DK * DV, d, e, DK, DV).to(do.dtype)
        y = tl.dot(inverse, dn, input_precision=PRECISION)
        store_tile(dv_ptr + head * T * DV, y * beta[:, None], rows, e, T, DV)
        dbeta += tl.sum(y * v.to(tl.float32), axis=1)
        y = y.to(do.dtype)
        dP = tl.dot(do, tl.trans(n), dP, input_precision=PRECISION)
        dA = tl.dot(y, tl.trans(n), dA, input_precision=PRECISION)
        dq = tl.dot(do, tl.trans(state), dq, input_precision=PRECISION)
        dk = tl.dot(n, tl.trans(r), dk, input_precision=PRECISION)
        x = tl.dot(y, tl.trans(state), x, input_precision=PRECISION)
    q = load_tile(q_ptr + head * T * DK, rows, d, T, DK)
    k = load_tile(k_ptr + head * T * DK, rows, d, T, DK)
    dP = tl.where(i[None, :] <= i[:, None], dP, 0.0).to(k.dtype)
    store_tile(dq_ptr + head * T * DK, tl.dot(dP, k, dq, input_precision=PRECISION), rows, d, T, DK)
    dA = tl.where(i[None, :] < i[:, None], -dA, 0.0)
    dbeta -= tl.sum(x * k.to(tl.float32), axis=1)
    dbeta += tl.sum(dA * tl.dot(k, tl.trans(k), input_precision=PRECISION), axis=1)
    tl.store(dbeta_ptr + head * T + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < T)
    dA = (dA * beta[:, None]).to(k.dtype)  # the gradient of <k_i, k_j>
    dk = tl.dot(tl.trans(dP), q, dk - x * beta[:, None], input_precision=PRECISION)
    dk = tl.dot(dA, k, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dA), k, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * T * DK, dk, rows, d, T, DK)


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, beta = (tensor.contiguous() for tensor in inputs)
        o, inverse = delta_rule_forward(q, k, v, beta)
        ctx.save_for_backward(q, k, v, beta, inverse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, beta, inverse = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, DK), DV, tiles = q.shape, v.shape[3], tiling(k)
        chunks = inverse.shape[2]
        sizes = (T, DK, DV, chunks)
        w, n, state = chunk_states(k, v, beta, inverse)
        r, local, dn = torch.empty_like(state), torch.empty_like(v), torch.empty_like(v)
        local_kernel[(chunks, B * H)](q, k, do, local, *sizes, **tiles)
        state_backward_kernel[(B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](
            q, k, w, do, local, r, dn, *sizes, **tiles
        )
        grads = tuple(torch.empty_like(tensor) for tensor in (q, k, v, beta))
        chunk_backward_kernel[(chunks, B * H)](
            q, k, v, beta, inverse, n, state, r, dn, do, *grads, *sizes, **tiles, num_warps=8
        )
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def delta_rule_autograd(q, k, v, beta):
    return DeltaRule.apply(q, k, v, beta)
