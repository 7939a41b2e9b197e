"""Causal linear attention by chunks, chunk states saved.

Forward    S_t = S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t;  for a chunk Q, K, V and the state S before it:
           O = Q S + (Q K^T * M) V,  M the causal mask with its diagonal
Backward   with R the gradient of the state after the chunk (from later chunks only):
           dQ = dO S^T + (dO V^T * M) K,   dK = V R^T + (dO V^T * M)^T Q,   dV = K R + (Q K^T * M)^T dO,
           and the gradient of the state before the chunk is R + Q^T dO

Forward schedule: a state kernel walks the chunks of a (head, value tile) and stores S before each; an
output kernel then treats all chunks in parallel.
Backward schedule: the mirror image. A state kernel walks the chunks from right to left and stores R; then
every chunk is independent, and its owner makes dQ, dK and dV by dots from S and R, each stored once. The
serial part is one D x D product a chunk; all else is parallel over chunks, without atomics.

op: linear_attention
schedule: chunk_state_pass, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 32


def tiling(q):
    """Tiles and the precision of dots; a state of more than 64 x 64 wants more warps."""
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[-1]))
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": CHUNK,
        "BLOCK_D": BLOCK_D,
        "num_warps": 4 if BLOCK_D <= 64 else 8,
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
def state_kernel(
    a_ptr, b_ptr, state_ptr, T, D, chunks,
    REVERSE: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """state[c] = sum of A_i^T B_i over the chunks i before c, or with REVERSE after c."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        store_tile(state_ptr + (head * chunks + c) * D * D, state, d, e, D, D)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        a = load_tile(a_ptr + head * T * D, rows, d, T, D)
        b = load_tile(b_ptr + head * T * D, rows, e, T, D)
        state = tl.dot(tl.trans(a), b, state, input_precision=PRECISION)


@triton.jit
def causal_product(a, b, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """A B^T with the entries above the diagonal dropped."""
    i = tl.arange(0, CHUNK)
    return tl.where(i[None, :] <= i[:, None], tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, o_ptr, T, D, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * T * D, rows, d, T, D)
    k = load_tile(k_ptr + head * T * D, rows, d, T, D)
    v = load_tile(v_ptr + head * T * D, rows, d, T, D)
    state = load_tile(state_ptr + (head * chunks + c) * D * D, d, d, D, D).to(q.dtype)
    o = tl.dot(q, state, input_precision=PRECISION)
    o = tl.dot(causal_product(q, k, PRECISION, CHUNK).to(v.dtype), v, o, input_precision=PRECISION)
    store_tile(o_ptr + head * T * D, o, rows, d, T, D)


def launch_states(a, b, reverse):
    B, H, T, D = a.shape
    chunks = triton.cdiv(T, CHUNK)
    state = torch.empty((B, H, chunks, D, D), device=a.device, dtype=torch.float32)
    grid = (B * H, triton.cdiv(D, 16))
    state_kernel[grid](a, b, state, T, D, chunks, REVERSE=reverse, BLOCK_V=16, **tiling(a))
    return state


def linear_attention_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, T, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    state = launch_states(k, v, False)
    o = torch.empty_like(v)
    chunks = state.shape[2]
    output_kernel[(chunks, B * H)](q, k, v, state, o, T, D, chunks, **tiling(q))
    return o, state


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_attention(q, k, v):
    return linear_attention_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    return (q @ k.transpose(-1, -2)).tril() @ v


SWEEP = [
    {"B": 4, "H": 16, "T": 2048, "D": 64},
    {"B": 2, "H": 16, "T": 4096, "D": 64},
    {"B": 1, "H": 20, "T": 5003, "D": 48},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 70, "D": 16}, {"B": 2, "H": 1, "T": 32, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["T"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) / dims["D"] ** 0.25 for _ in range(3))


# ---- backward ----


@triton.jit
def chunk_backward_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, r_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, T, D, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * T * D, rows, d, T, D)
    k = load_tile(k_ptr + head * T * D, rows, d, T, D)
    v = load_tile(v_ptr + head * T * D, rows, d, T, D)
    do = load_tile(do_ptr + head * T * D, rows, d, T, D)
    state = load_tile(state_ptr + (head * chunks + c) * D * D, d, d, D, D).to(q.dtype)
    r = load_tile(r_ptr + (head * chunks + c) * D * D, d, d, D, D).to(q.dtype)

    dp = causal_product(do, v, PRECISION, CHUNK).to(q.dtype)
    dq = tl.dot(do, tl.trans(state), input_precision=PRECISION)
    dq = tl.dot(dp, k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * T * D, dq, rows, d, T, D)
    dk = tl.dot(v, tl.trans(r), input_precision=PRECISION)
    dk = tl.dot(tl.trans(dp), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * T * D, dk, rows, d, T, D)
    dv = tl.dot(k, r, input_precision=PRECISION)
    dv = tl.dot(
        tl.trans(causal_product(q, k, PRECISION, CHUNK).to(do.dtype)), do, dv, input_precision=PRECISION
    )
    store_tile(dv_ptr + head * T * D, dv, rows, d, T, D)


class LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, state = linear_attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, state)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, state = ctx.saved_tensors
        do = do.contiguous()
        B, H, T, D = q.shape
        r = launch_states(q, do, True)
        chunks = r.shape[2]
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grid = (chunks, B * H)
        chunk_backward_kernel[grid](q, k, v, state, r, do, *grads, T, D, chunks, **tiling(q))
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def linear_attention_autograd(q, k, v):
    return LinearAttention.apply(q, k, v)
