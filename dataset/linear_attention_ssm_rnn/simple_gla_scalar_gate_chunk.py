"""Gated linear attention with one scalar gate a head and step, by chunks.

Forward    S_t = e^{g_t} S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t.  In a chunk, with b_i = g_1 + .. + g_i from
           its start, b the last of them and S the state before it:  A_ij = e^{b_i - b_j} q_i.k_j for j <= i,
           O = diag(e^{b_i}) Q S + A V,   S' = e^b S + K^T diag(e^{b - b_j}) V
Backward   R is the gradient of the state after the chunk; before it, e^b R + Q^T diag(e^{b_i}) dO.
           With dA_ij = e^{b_i - b_j} <do_i, v_j> for j <= i:
           dQ = diag(e^{b_i}) dO S^T + dA K,   dK = diag(e^{b - b_j}) V R^T + dA^T Q,
           dV = diag(e^{b - b_j}) K R + A^T dO.
           Gates: let G_t = g_1 + .. + g_t from the start of the sequence. The output is a function of the
           products e^{G_i} q_i and e^{-G_j} k_j alone, so dG_t = <q_t, dq_t> - <k_t, dk_t>, and dg_t is the
           sum of dG from t to the end of the sequence. What all later chunks add to it is <R, S'>: a gate
           scales the state that crosses a border.

Forward schedule: a state kernel walks the chunks of a (head, value tile) and stores S before each; an output
kernel treats all chunks in parallel. Only differences of b are exponentiated, with j <= i, so nothing
overflows for gates below zero. q, k, v and the states are kept, A is not.
Backward schedule: the mirror. The same state kernel walks from right to left and stores R, after which the
owner of each chunk makes dQ, dK, dV with dots and stores each once. The identity of the gates saves a third
product with the states: q.dq - k.dk takes what is in registers. Summed from the end of the sequence, what
rounding leaves of these differences would grow with its length; <R, S'> is made anew at each border, so a
suffix sum within the chunk is all that is left of dg, and no pass over time.

op: simple_gla
schedule: chunk_state_pass, reverse_scan, swap_owner
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 32


def tiling(q):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "CHUNK": CHUNK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_gates(g_ptr, rows, T):
    """b_i of the chunk's rows, and b; rows past T have a gate of 0, so that b is the last row's."""
    g = tl.load(g_ptr + rows, mask=rows < T, other=0.0).to(tl.float32)
    return tl.cumsum(g, axis=0), tl.sum(g, axis=0)


@triton.jit
def state_kernel(
    a_ptr, b_ptr, g_ptr, state_ptr, T, D, chunks,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S before each chunk from (k, v), or with REVERSE R after each chunk from (q, do)."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        store_tile(state_ptr + (head * chunks + c) * D * D, state, d, e, D, D)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        sums, total = load_gates(g_ptr + head * T, rows, T)
        weight = tl.exp(sums if REVERSE else total - sums)
        a = load_tile(a_ptr + head * T * D, rows, d, T, D)
        b = load_tile(b_ptr + head * T * D, rows, e, T, D)
        scaled = (a.to(tl.float32) * weight[:, None]).to(a.dtype)
        state = tl.dot(tl.trans(scaled), b, state * tl.exp(total), input_precision=PRECISION)


@triton.jit
def decayed_product(x, y, sums, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """e^{b_i - b_j} <x_i, y_j> for j <= i, 0 elsewhere."""
    i = tl.arange(0, CHUNK)
    seen = i[None, :] <= i[:, None]
    decay = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
    return tl.where(seen, tl.dot(x, tl.trans(y), input_precision=PRECISION) * decay, 0.0)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, state_ptr, o_ptr, T, D, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    sums, _ = load_gates(g_ptr + head * T, rows, T)
    q = load_tile(q_ptr + head * T * D, rows, d, T, D)
    k = load_tile(k_ptr + head * T * D, rows, d, T, D)
    v = load_tile(v_ptr + head * T * D, rows, d, T, D)
    state = load_tile(state_ptr + (head * chunks + c) * D * D, d, d, D, D).to(q.dtype)
    o = tl.dot(q, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    o = tl.dot(decayed_product(q, k, sums, PRECISION, CHUNK).to(v.dtype), v, o, input_precision=PRECISION)
    store_tile(o_ptr + head * T * D, o, rows, d, T, D)


def launch_states(a, b, g, reverse):
    B, H, T, D = a.shape
    chunks = triton.cdiv(T, CHUNK)
    state = torch.empty((B, H, chunks, D, D), device=a.device, dtype=torch.float32)
    state_kernel[(B * H, triton.cdiv(D, 16))](
        a, b, g, state, T, D, chunks, REVERSE=reverse, BLOCK_V=16, **tiling(a)
    )
    return state


def simple_gla_forward(q, k, v, g):
    if not q.shape == k.shape == v.shape or g.shape != q.shape[:3]:
        raise ValueError("q, k and v must have one shape, and g its first three sizes")
    B, H, T, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    state = launch_states(k, v, g, False)
    o = torch.empty_like(v)
    chunks = state.shape[2]
    output_kernel[(chunks, B * H)](q, k, v, g, state, o, T, D, chunks, **tiling(q))
    return o, state


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def simple_gla(q, k, v, g):
    """q, k, v: (B, H, T, D); g: (B, H, T), the logarithm of the gate, at most 0."""
    return simple_gla_forward(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())[0]


def reference(q, k, v, g):
    sums = g.cumsum(-1)
    decay = sums[..., :, None] - sums[..., None, :]
    future = torch.ones(decay.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    return ((q @ k.transpose(-1, -2)) * torch.exp(decay.masked_fill(future, -float("inf")))) @ v


SWEEP = [{"B": 2, "H": 16, "T": 4096, "D": 64}, {"B": 1, "H": 8, "T": 2039, "D": 128}]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 70, "D": 16}, {"B": 2, "H": 1, "T": 32, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["T"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) / dims["D"] ** 0.25 for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(3 + torch.randn(shape[:3], device=device, dtype=dtype))


# ---- backward ----


@triton.jit
def chunk_backward_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, state_ptr, r_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, T, D, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    sums, total = load_gates(g_ptr + head * T, rows, T)
    r = load_tile(r_ptr + (head * chunks + c) * D * D, d, d, D, D)
    border = tl.minimum(c + 1, chunks - 1)  # past the last one R is zero
    crossing = tl.sum(r * load_tile(state_ptr + (head * chunks + border) * D * D, d, d, D, D))
    q = load_tile(q_ptr + head * T * D, rows, d, T, D)
    k = load_tile(k_ptr + head * T * D, rows, d, T, D)
    v = load_tile(v_ptr + head * T * D, rows, d, T, D)
    do = load_tile(do_ptr + head * T * D, rows, d, T, D)
    state = load_tile(state_ptr + (head * chunks + c) * D * D, d, d, D, D).to(q.dtype)
    r = r.to(q.dtype)
    from_start, to_end = tl.exp(sums)[:, None], tl.exp(total - sums)[:, None]

    da = decayed_product(do, v, sums, PRECISION, CHUNK).to(q.dtype)
    dq = tl.dot(do, tl.trans(state), input_precision=PRECISION) * from_start
    dq = tl.dot(da, k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * T * D, dq, rows, d, T, D)
    dk = tl.dot(v, tl.trans(r), input_precision=PRECISION) * to_end
    dk = tl.dot(tl.trans(da), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * T * D, dk, rows, d, T, D)
    dsum = tl.sum(q.to(tl.float32) * dq - k.to(tl.float32) * dk, axis=1)
    dg = crossing + tl.sum(dsum, axis=0) - tl.cumsum(dsum, axis=0) + dsum
    tl.store(dg_ptr + head * T + rows, dg.to(dg_ptr.dtype.element_ty), mask=rows < T)
    dv = tl.dot(k, r, input_precision=PRECISION) * to_end
    a = decayed_product(q, k, sums, PRECISION, CHUNK).to(do.dtype)
    dv = tl.dot(tl.trans(a), do, dv, input_precision=PRECISION)
    store_tile(dv_ptr + head * T * D, dv, rows, d, T, D)


class SimpleGla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g):
        q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
        o, state = simple_gla_forward(q, k, v, g)
        ctx.save_for_backward(q, k, v, g, state)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, g, state = ctx.saved_tensors
        do = do.contiguous()
        B, H, T, D = q.shape
        r = launch_states(q, do, g, True)
        chunks = r.shape[2]
        dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
        chunk_backward_kernel[(chunks, B * H)](
            q, k, v, g, state, r, do, dq, dk, dv, dg, T, D, chunks, **tiling(q)
        )
        grads = zip((dq, dk, dv, dg), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def simple_gla_autograd(q, k, v, g):
    return SimpleGla.apply(q, k, v, g)
