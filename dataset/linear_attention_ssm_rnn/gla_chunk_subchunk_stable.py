"""Gated linear attention with a gate for each key channel, by chunks of sub-chunks, safe for any gate.

Forward    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t.  In a chunk, with b_i = g_1 + .. + g_i
           from its start, b the last of them and S the state before it:
           A_ij = sum_d q_id k_jd e^{b_id - b_jd} for j <= i,   O = (Q * e^{b_i}) S + A V,
           S' = diag(e^b) S + (K * e^{b - b_j})^T V
Backward   R is the gradient of S'; before the chunk, diag(e^b) R + (Q * e^{b_i})^T dO.  With dA = dO V^T for
           j <= i:   dq_i = e^{b_i} * S do_i + sum_j dA_ij k_j * e^{b_i - b_j},
           dk_j = e^{b - b_j} * R v_j + sum_i dA_ij q_i * e^{b_i - b_j},   dV = (K * e^{b - b_j}) R + A^T dO.
           The output depends on the gates through e^{b_i} q_i and e^{-b_j} k_j, so, with
           u_t = q_t * dq_t - k_t * dk_t,  dg_t is the sum of u from t to the end of the chunk and what later
           chunks add to it, the row sums of R * S', since a gate scales what leaves the chunk

Forward schedule: A is a product of Q * e^{b_i} with K * e^{-b_j} only on paper: e^{-b_j} overflows after a
few strong gates, and no common maximum helps, as each channel has gates of its own. So a chunk is cut into
sub-chunks of 16. A block of A below the diagonal has a border n between its columns and its rows, where
e^{b_i - n} and e^{n - b_j} are both at most 1: a dot. A block on the diagonal has none, and is summed
elementwise, a column at a time. A program owns a sub-chunk of outputs; A is never stored.
Backward schedule: a program owns a sub-chunk in all its roles. As queries, it walks the earlier sub-chunks of
its chunk, with the border at its first row; as keys and values the later ones, with the border at its last:
the borders are the owner's, so that a sum over blocks is one accumulator, scaled once. The elementwise block
serves dq, dk and A^T in one loop. u is stored in float32, before dq and dk are rounded; suffix sums and the
states that cross borders make dg of it in a small kernel of their own.

op: gla
schedule: chunk_state_pass, swap_owner, reverse_scan
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SUB = 16


def tiling(k, v):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    BLOCK_K, BLOCK_V = (max(16, triton.next_power_of_2(tensor.shape[3])) for tensor in (k, v))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": 32 if k.dtype == torch.float32 else 64,
        "SUB": SUB,
        "BLOCK_K": BLOCK_K,
        "BLOCK_V": BLOCK_V,
        "STEP": 16 if k.dtype == torch.float32 else 32,
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
def gate_sum_kernel(g_ptr, b_ptr, T, DK, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """b of a chunk, for rows past T too: their gates are 0, so that they repeat the last row of b."""
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    g = load_tile(g_ptr + head * T * DK, rows, d, T, DK).to(tl.float32)
    b = tl.cumsum(g, axis=0)
    store_tile(b_ptr + head * chunks * CHUNK * DK, b, rows, d, chunks * CHUNK, DK)


@triton.jit
def state_kernel(
    left_ptr, b_ptr, right_ptr, state_ptr, T, DK, DV, chunks, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """S before each chunk from (k, v), or with REVERSE R after each chunk from (q, do)."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(1) * STEP + tl.arange(0, STEP)
    state = tl.zeros([BLOCK_K, STEP], dtype=tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        store_tile(state_ptr + (head * chunks + c) * DK * DV, state, d, e, DK, DV)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        sums_ptr = b_ptr + head * chunks * CHUNK * DK
        b = load_tile(sums_ptr, rows, d, chunks * CHUNK, DK)
        total = tl.load(sums_ptr + (c * CHUNK + CHUNK - 1) * DK + d, mask=d < DK, other=0.0)
        left = load_tile(left_ptr + head * T * DK, rows, d, T, DK)
        right = load_tile(right_ptr + head * T * DV, rows, e, T, DV)
        weight = tl.exp(b if REVERSE else total[None, :] - b)
        scaled = tl.trans((left.to(tl.float32) * weight).to(left.dtype))
        state = tl.dot(scaled, right, state * tl.exp(total)[:, None], input_precision=PRECISION)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, state_ptr, o_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * SUB
    c, head = own // CHUNK, tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SUB)
    rows = own + i
    d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_ptr, k_ptr, v_ptr = q_ptr + head * T * DK, k_ptr + head * T * DK, v_ptr + head * T * DV
    b_ptr += head * chunks * CHUNK * DK
    state_ptr += (head * chunks + c) * DK * DV
    o = tl.zeros([SUB, BLOCK_V], dtype=tl.float32)
    for start in range(0, DK, STEP):
        part = start + tl.arange(0, STEP)
        q = load_tile(q_ptr, rows, part, T, DK)
        q = (q.to(tl.float32) * tl.exp(load_tile(b_ptr, rows, part, chunks * CHUNK, DK))).to(q.dtype)
        state = load_tile(state_ptr, part, e, DK, DV).to(q.dtype)
        o = tl.dot(q, state, o, input_precision=PRECISION)

    q = load_tile(q_ptr, rows, d, T, DK)
    b = load_tile(b_ptr, rows, d, chunks * CHUNK, DK)
    before = tl.load(b_ptr + (own - 1) * DK + d, mask=(d < DK) & (own > c * CHUNK), other=0.0)
    q32 = q.to(tl.float32)
    q_border = (q32 * tl.exp(b - before[None, :])).to(q.dtype)
    for start in range(c * CHUNK, own, SUB):
        cols = start + i
        k = load_tile(k_ptr, cols, d, T, DK)
        weight = tl.exp(before[None, :] - load_tile(b_ptr, cols, d, chunks * CHUNK, DK))
        k = (k.to(tl.float32) * weight).to(k.dtype)
        A = tl.dot(q_border, tl.trans(k), input_precision=PRECISION)
        v = load_tile(v_ptr, cols, e, T, DV)
        o = tl.dot(A.to(v.dtype), v, o, input_precision=PRECISION)

    A = tl.zeros([SUB, SUB], dtype=tl.float32)
    for j in range(SUB):
        b_j = tl.load(b_ptr + (own + j) * DK + d, mask=d < DK, other=0.0)
        k_j = tl.load(k_ptr + (own + j) * DK + d, mask=(d < DK) & (own + j < T), other=0.0).to(tl.float32)
        decay = tl.exp(tl.where(i[:, None] >= j, b - b_j[None, :], -float("inf")))
        A = tl.where(i[None, :] == j, tl.sum(q32 * k_j[None, :] * decay, axis=1)[:, None], A)
    v = load_tile(v_ptr, rows, e, T, DV)
    o = tl.dot(A.to(v.dtype), v, o, input_precision=PRECISION)
    store_tile(o_ptr + head * T * DV, o, rows, e, T, DV)


def launch_states(left, b, right, tiles, reverse):
    (B, H, T, DK), DV = left.shape, right.shape[3]
    chunks = triton.cdiv(T, tiles["CHUNK"])
    state = torch.empty((B, H, chunks, DK, DV), device=left.device, dtype=torch.float32)
    state_kernel[(B * H, triton.cdiv(DV, tiles["STEP"]))](
        left, b, right, state, T, DK, DV, chunks, REVERSE=reverse, **tiles
    )
    return state


def gla_forward(q, k, v, g):
    if not k.shape == g.shape == q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError("q, k and g must have one shape, and v its batch, heads and time")
    (B, H, T, DK), DV, tiles = q.shape, v.shape[3], tiling(k, v)
    if DK > 128 or DV > 128:
        raise ValueError(f"head dimensions {DK} and {DV} do not fit one tile")
    chunks = triton.cdiv(T, tiles["CHUNK"])
    b = torch.empty((B, H, chunks * tiles["CHUNK"], DK), device=q.device, dtype=torch.float32)
    gate_sum_kernel[(chunks, B * H, triton.cdiv(DK, 32))](g, b, T, DK, chunks, CHUNK=tiles["CHUNK"], BLOCK=32)
    state = launch_states(k, b, v, tiles, False)
    o = torch.empty_like(v)
    output_kernel[(triton.cdiv(T, SUB), B * H)](q, k, v, b, state, o, T, DK, DV, chunks, **tiles)
    return o, b, state


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gla(q, k, v, g):
    """q, k, g: (B, H, T, DK), g the logarithm of the gate, at most 0; v: (B, H, T, DV)."""
    return gla_forward(*(tensor.contiguous() for tensor in (q, k, v, g)))[0]


def reference(q, k, v, g):
    state, steps = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = g[:, :, t, :, None].exp() * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        steps.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(steps, dim=2)


SWEEP = [
    {"B": 2, "H": 8, "T": 2048, "DK": 64, "DV": 128},
    {"B": 1, "H": 4, "T": 1021, "DK": 128, "DV": 96},
]
SWEEP_CPU = [{"B": 1, "H": 1, "T": 70, "DK": 16, "DV": 20}, {"B": 2, "H": 1, "T": 31, "DK": 20, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    q, k = (torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.25 for _ in range(2))
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    return q, k, v, torch.nn.functional.logsigmoid(1 + 2 * torch.randn_like(q))


# ---- backward ----


# long: its three roles share the tiles of one sub-chunk, loaded once
@triton.jit
def sub_chunk_backward_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, state_ptr, r_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, u_ptr, T, DK, DV, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * SUB
    c, head = own // CHUNK, tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SUB)
    rows = own + i
    d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_ptr, k_ptr = q_ptr + head * T * DK, k_ptr + head * T * DK
    v_ptr, do_ptr = v_ptr + head * T * DV, do_ptr + head * T * DV
    b_ptr += head * chunks * CHUNK * DK
    state_ptr += (head * chunks + c) * DK * DV
    r_ptr += (head * chunks + c) * DK * DV
    b = load_tile(b_ptr, rows, d, chunks * CHUNK, DK)
    last = c * CHUNK + CHUNK - 1

    dq = tl.zeros([SUB, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([SUB, BLOCK_K], dtype=tl.float32)
    for start in range(0, DV, STEP):  # what goes through the states
        part = start + tl.arange(0, STEP)
        do = load_tile(do_ptr, rows, part, T, DV)
        v = load_tile(v_ptr, rows, part, T, DV)
        state = load_tile(state_ptr, d, part, DK, DV).to(do.dtype)
        dq = tl.dot(do, tl.trans(state), dq, input_precision=PRECISION)
        r = load_tile(r_ptr, d, part, DK, DV).to(v.dtype)
        dk = tl.dot(v, tl.trans(r), dk, input_precision=PRECISION)
    total = tl.load(b_ptr + last * DK + d, mask=d < DK, other=0.0)
    dq *= tl.exp(b)
    dk *= tl.exp(total[None, :] - b)
    dv = tl.zeros([SUB, BLOCK_V], dtype=tl.float32)
    for start in range(0, DK, STEP):
        part = start + tl.arange(0, STEP)
        end = tl.load(b_ptr + last * DK + part, mask=part < DK, other=0.0)
        weight = tl.exp(end[None, :] - load_tile(b_ptr, rows, part, chunks * CHUNK, DK))
        k = load_tile(k_ptr, rows, part, T, DK)
        k = (k.to(tl.float32) * weight).to(k.dtype)
        r = load_tile(r_ptr, part, e, DK, DV).to(k.dtype)
        dv = tl.dot(k, r, dv, input_precision=PRECISION)

    q = load_tile(q_ptr, rows, d, T, DK)
    k = load_tile(k_ptr, rows, d, T, DK)
    v = load_tile(v_ptr, rows, e, T, DV)
    do = load_tile(do_ptr, rows, e, T, DV)
    before = tl.load(b_ptr + (own - 1) * DK + d, mask=(d < DK) & (own > c * CHUNK), other=0.0)
    acc = tl.zeros([SUB, BLOCK_K], dtype=tl.float32)
    for start in range(c * CHUNK, own, SUB):  # as queries of earlier keys
        cols = start + i
        weight = tl.exp(before[None, :] - load_tile(b_ptr, cols, d, chunks * CHUNK, DK))
        k_J = (load_tile(k_ptr, cols, d, T, DK).to(tl.float32) * weight).to(k.dtype)
        dA = tl.dot(do, tl.trans(load_tile(v_ptr, cols, e, T, DV)), input_precision=PRECISION)
        acc = tl.dot(dA.to(k.dtype), k_J, acc, input_precision=PRECISION)
    dq += acc * tl.exp(b - before[None, :])

    after = tl.load(b_ptr + (own + SUB - 1) * DK + d, mask=d < DK, other=0.0)
    to_border = tl.exp(after[None, :] - b)
    k_border = (k.to(tl.float32) * to_border).to(k.dtype)
    acc = tl.zeros([SUB, BLOCK_K], dtype=tl.float32)
    for start in range(own + SUB, tl.minimum(last + 1, T), SUB):  # as keys and values of later queries
        cols = start + i
        weight = tl.exp(load_tile(b_ptr, cols, d, chunks * CHUNK, DK) - after[None, :])
        q_I = (load_tile(q_ptr, cols, d, T, DK).to(tl.float32) * weight).to(q.dtype)
        do_I = load_tile(do_ptr, cols, e, T, DV)
        dA = tl.dot(v, tl.trans(do_I), input_precision=PRECISION)  # (key, query)
        acc = tl.dot(dA.to(q.dtype), q_I, acc, input_precision=PRECISION)
        A = tl.dot(k_border, tl.trans(q_I), input_precision=PRECISION)
        dv = tl.dot(A.to(do.dtype), do_I, dv, input_precision=PRECISION)
    dk += acc * to_border

    dA = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    A = tl.zeros([SUB, SUB], dtype=tl.float32)
    q32 = q.to(tl.float32)
    for j in range(SUB):
        b_j = tl.load(b_ptr + (own + j) * DK + d, mask=d < DK, other=0.0)
        k_j = tl.load(k_ptr + (own + j) * DK + d, mask=(d < DK) & (own + j < T), other=0.0).to(tl.float32)
        decay = tl.exp(tl.where(i[:, None] >= j, b - b_j[None, :], -float("inf")))
        A = tl.where(i[None, :] == j, tl.sum(q32 * k_j[None, :] * decay, axis=1)[:, None], A)
        pull = tl.sum(tl.where(i[None, :] == j, dA, 0.0), axis=1)[:, None] * decay
        dq += pull * k_j[None, :]
        dk += tl.where(i[:, None] == j, tl.sum(pull * q32, axis=0)[None, :], 0.0)
    dv = tl.dot(tl.trans(A.to(do.dtype)), do, dv, input_precision=PRECISION)
    store_tile(dq_ptr + head * T * DK, dq, rows, d, T, DK)
    store_tile(dk_ptr + head * T * DK, dk, rows, d, T, DK)
    store_tile(dv_ptr + head * T * DV, dv, rows, e, T, DV)
    store_tile(u_ptr + head * T * DK, q32 * dq - k.to(tl.float32) * dk, rows, d, T, DK)


@triton.jit
def dg_kernel(
    u_ptr, state_ptr, r_ptr, dg_ptr, T, DK, DV, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    c, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_V)
    r = load_tile(r_ptr + (head * chunks + c) * DK * DV, d, e, DK, DV)
    border = tl.minimum(c + 1, chunks - 1)  # past the last one R is zero
    crossing = tl.sum(r * load_tile(state_ptr + (head * chunks + border) * DK * DV, d, e, DK, DV), axis=1)
    u = load_tile(u_ptr + head * T * DK, rows, d, T, DK)
    dg = crossing[None, :] + tl.cumsum(u, axis=0, reverse=True)
    store_tile(dg_ptr + head * T * DK, dg, rows, d, T, DK)


class Gla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, g = (tensor.contiguous() for tensor in inputs)
        o, b, state = gla_forward(q, k, v, g)
        ctx.save_for_backward(q, k, v, g, b, state)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, g, b, state = ctx.saved_tensors
        do = do.contiguous()
        (B, H, T, DK), DV, tiles = q.shape, v.shape[3], tiling(k, v)
        chunks = state.shape[2]
        r = launch_states(q, b, do, tiles, True)
        dq, dk, dv, dg = (torch.empty_like(tensor) for tensor in (q, k, v, g))
        u = torch.empty(q.shape, device=q.device, dtype=torch.float32)
        sub_chunk_backward_kernel[(triton.cdiv(T, SUB), B * H)](
            q, k, v, b, state, r, do, dq, dk, dv, u, T, DK, DV, chunks, **tiles, num_warps=8
        )
        if ctx.needs_input_grad[3]:
            dg_kernel[(chunks, B * H, triton.cdiv(DK, 16))](
                u, state, r, dg, T, DK, DV, chunks,
                CHUNK=tiles["CHUNK"], BLOCK=16, BLOCK_V=tiles["BLOCK_V"],
            )  # fmt: skip
        grads = zip((dq, dk, dv, dg), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def gla_autograd(q, k, v, g):
    return Gla.apply(q, k, v, g)
