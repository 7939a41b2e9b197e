"""State space duality, the layer of Mamba-2: scalar decay a head, B and C shared by all heads.

Forward    S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T,  y_t = S_t^T C_t + D x_t,  with dt, A, D, x, y a head's.
           In a chunk, with s_i = A (dt_1 + .. + dt_i) from its start, s the last of them, S the state before
           it and X = diag(dt) x:   L_ij = e^{s_i - s_j} for j <= i,   M = (C B^T) * L,
           y = M X + diag(e^{s_i}) C S + D x,    S' = e^s S + B^T diag(e^{s - s_j}) X
Backward   R is the gradient of the state after the chunk; before it, e^s R + C^T diag(e^{s_i}) dy.
           dM = dy X^T for j <= i,   dX = M^T dy + diag(e^{s - s_j}) B R,   dx = diag(dt) dX + D dy,
           dC = W B + sum_h diag(e^{s_i}) dy S^T,   dB = W^T C + sum_h diag(e^{s - s_j}) X R^T,
           W = sum_h dM * L,   dD = sum <dy_t, x_t>.
           Decays: the decay of step t scales what crosses t, from j < t to i >= t. With reads
           u_i = e^{s_i} <dy_i, (C S)_i> and writes w_j = e^{s - s_j} <X_j, (B R)_j>, dt_t A has the gradient
           da_t = sum_{j < t <= i} (dM * M)_ij + sum_{i >= t} u_i + sum_{j < t} w_j + e^s <R, S>;
           ddt_t = <x_t, dX_t> + A da_t,   dA = sum_t dt_t da_t

Forward schedule: a state kernel walks the chunks of a (head, channel tile) and stores S before each; an
output kernel then treats all chunks in parallel. Only differences of s with j <= i are exponentiated, so
nothing overflows for A below zero.
Backward schedule: the inputs are all that is saved; states are N P numbers a chunk and head, more than x
itself, and the walk that makes them is cheap beside the dots. The same state kernel makes S again, and, from
right to left with (C, dy), R. Two owners follow. (chunk, head) makes dx and the decays' gradients: the sum
over the pairs that cross t is the suffix sum of rowsum - colsum of a tile at hand. A global identity, <C, dC>
- <B, dB> summed from the end, would do as well in exact numbers; in bf16 its two sides are rounded apart, and
of what is left the small gradients are lost, while here all terms of different origin are added. (chunk)
loops the heads for dB and dC, which all heads share: W is summed before it meets B and C, so their dots are
made once a chunk and not once a head, and no (heads, T, N) partials are stored. dA and dD go through one slot
a (chunk, head).

op: ssd
schedule: chunk_state_pass, reverse_scan, swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x, B):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_P, BLOCK_N = (max(16, triton.next_power_of_2(t.shape[-1])) for t in (x, B))
    CHUNK = 32 if x.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "CHUNK": CHUNK, "BLOCK_P": BLOCK_P, "BLOCK_N": BLOCK_N}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C, stride):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_decay(dt_ptr, A, rows, T, H):
    """dt, s_i and s; rows past T have dt 0, so that s is the last row's."""
    dt = tl.load(dt_ptr + rows * H, mask=rows < T, other=0.0).to(tl.float32)
    return dt, tl.cumsum(dt * A, axis=0), tl.sum(dt * A, axis=0)


@triton.jit
def state_kernel(
    left_ptr, right_ptr, dt_ptr, A_ptr, state_ptr, T, H, P, N, chunks, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """S before each chunk from (B, x), or with REVERSE R after each chunk from (C, dy)."""
    batch = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    A = tl.load(A_ptr + h).to(tl.float32)
    state = tl.zeros([BLOCK_N, BLOCK_P], dtype=tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        place = (tl.program_id(0).to(tl.int64) * chunks + c) * N * P
        store_tile(state_ptr + place, state, n, p, N, P, P)
        rows = c * CHUNK + tl.arange(0, CHUNK)
        dt, sums, total = load_decay(dt_ptr + batch * T * H + h, A, rows, T, H)
        weight = tl.exp(sums) if REVERSE else tl.exp(total - sums) * dt
        left = load_tile(left_ptr + batch * T * N, rows, n, T, N, N)
        right = load_tile(right_ptr + (batch * T * H + h) * P, rows, p, T, P, H * P)
        scaled = tl.trans((left.to(tl.float32) * weight[:, None]).to(left.dtype))
        state = tl.dot(scaled, right, state * tl.exp(total), input_precision=PRECISION)


def launch_states(left, right, dt, A, reverse):
    (Bt, T, H, P), N, tiles = right.shape, left.shape[2], tiling(right, left)
    chunks = triton.cdiv(T, tiles["CHUNK"])
    state = torch.empty((Bt, H, chunks, N, P), device=right.device, dtype=torch.float32)
    tiles["BLOCK_P"] = 16
    state_kernel[(Bt * H, triton.cdiv(P, 16))](
        left, right, dt, A, state, T, H, P, N, chunks, REVERSE=reverse, **tiles
    )
    return state


@triton.jit
def decay_tile(sums, CHUNK: tl.constexpr):
    """L: e^{s_i - s_j} for j <= i, 0 elsewhere."""
    i = tl.arange(0, CHUNK)
    return tl.exp(tl.where(i[None, :] <= i[:, None], sums[:, None] - sums[None, :], -float("inf")))


@triton.jit
def output_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, state_ptr, y_ptr, T, H, P, N, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    n, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    A = tl.load(A_ptr + h).to(tl.float32)
    dt, sums, _ = load_decay(dt_ptr + batch * T * H + h, A, rows, T, H)
    head = (batch * T * H + h) * P
    x = load_tile(x_ptr + head, rows, p, T, P, H * P)
    B = load_tile(B_ptr + batch * T * N, rows, n, T, N, N)
    C = load_tile(C_ptr + batch * T * N, rows, n, T, N, N)
    place = (tl.program_id(1).to(tl.int64) * chunks + tl.program_id(0)) * N * P
    state = load_tile(state_ptr + place, n, p, N, P, P).to(x.dtype)
    X = (x.to(tl.float32) * dt[:, None]).to(x.dtype)
    M = tl.dot(C, tl.trans(B), input_precision=PRECISION) * decay_tile(sums, CHUNK)
    y = tl.dot(C, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    y = tl.dot(M.to(x.dtype), X, y, input_precision=PRECISION)
    y += tl.load(D_ptr + h).to(tl.float32) * x.to(tl.float32)
    store_tile(y_ptr + head, y, rows, p, T, P, H * P)


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4, 5))
def ssd(x, dt, A, B, C, D):
    """x: (batch, T, H, P); dt: (batch, T, H), at least 0; A, D: (H), A at most 0; B, C: (batch, T, N)."""
    (Bt, T, H, P), N = x.shape, B.shape[2]
    if dt.shape != (Bt, T, H) or A.shape != (H,) or D.shape != (H,) or not B.shape == C.shape == (Bt, T, N):
        raise ValueError(f"dt, A, B, C and D do not fit x of {tuple(x.shape)}")
    if P > 128 or N > 128:
        raise ValueError(f"a state of {N} by {P} does not fit one tile")
    x, dt, A, B, C, D = (tensor.contiguous() for tensor in (x, dt, A, B, C, D))
    state = launch_states(B, x, dt, A, False)
    chunks = state.shape[2]
    y = torch.empty_like(x)
    output_kernel[(chunks, Bt * H)](x, dt, A, B, C, D, state, y, T, H, P, N, chunks, **tiling(x, B))
    return y


def reference(x, dt, A, B, C, D):
    sums = (dt * A).cumsum(1).transpose(1, 2)
    decay = sums[..., :, None] - sums[..., None, :]
    future = torch.ones(decay.shape[-2:], device=x.device, dtype=torch.bool).triu(1)
    scores = (C @ B.transpose(1, 2))[:, None] * torch.exp(decay.masked_fill(future, -float("inf")))
    return torch.einsum("bhij,bjhp->bihp", scores, x * dt[..., None]) + D[:, None] * x


SWEEP = [
    {"Bt": 2, "T": 2048, "H": 24, "P": 64, "N": 128},
    {"Bt": 1, "T": 2039, "H": 48, "P": 64, "N": 64},
]
SWEEP_CPU = [
    {"Bt": 1, "T": 70, "H": 2, "P": 16, "N": 16},
    {"Bt": 2, "T": 32, "H": 3, "P": 20, "N": 24},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    Bt, T, H, P, N = (dims[key] for key in ("Bt", "T", "H", "P", "N"))
    x = torch.randn(Bt, T, H, P, device=device, dtype=dtype)
    dt = torch.nn.functional.softplus(torch.randn(Bt, T, H, device=device, dtype=dtype) - 2)
    A, D = -1 - 3 * torch.rand(H, device=device, dtype=dtype), torch.ones(H, device=device, dtype=dtype)
    B, C = (torch.randn(Bt, T, N, device=device, dtype=dtype) / max(1, N) ** 0.25 for _ in range(2))
    return x, dt, A, B, C, D


# ---- backward ----


@triton.jit
def head_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, state_ptr, r_ptr, dy_ptr, dx_ptr, ddt_ptr, slots_ptr,
    T, H, P, N, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx and ddt of a (chunk, head), and its shares of dA and dD."""
    c, batch = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rows = c * CHUNK + tl.arange(0, CHUNK)
    n, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    A = tl.load(A_ptr + h).to(tl.float32)
    dt, sums, total = load_decay(dt_ptr + batch * T * H + h, A, rows, T, H)
    states = tl.program_id(1).to(tl.int64) * chunks
    r = load_tile(r_ptr + (states + c) * N * P, n, p, N, P, P)
    state = load_tile(state_ptr + (states + c) * N * P, n, p, N, P, P)
    across = tl.sum(r * state) * tl.exp(total)
    head = (batch * T * H + h) * P
    x = load_tile(x_ptr + head, rows, p, T, P, H * P)
    dy = load_tile(dy_ptr + head, rows, p, T, P, H * P)
    B = load_tile(B_ptr + batch * T * N, rows, n, T, N, N)
    C = load_tile(C_ptr + batch * T * N, rows, n, T, N, N)
    x32, dy32 = x.to(tl.float32), dy.to(tl.float32)
    X = x32 * dt[:, None]

    read = tl.sum(dy32 * tl.dot(C, state.to(x.dtype), input_precision=PRECISION), axis=1) * tl.exp(sums)
    dX = tl.dot(B, r.to(x.dtype), input_precision=PRECISION) * tl.exp(total - sums)[:, None]
    write = tl.sum(X * dX, axis=1)
    M = tl.dot(C, tl.trans(B), input_precision=PRECISION) * decay_tile(sums, CHUNK)
    both = tl.dot(dy, tl.trans(X.to(x.dtype)), input_precision=PRECISION) * M
    read += tl.sum(both, axis=1) - tl.sum(both, axis=0)
    dX = tl.dot(tl.trans(M.to(dy.dtype)), dy, dX, input_precision=PRECISION)

    D = tl.load(D_ptr + h).to(tl.float32)
    store_tile(dx_ptr + head, dX * dt[:, None] + D * dy32, rows, p, T, P, H * P)
    da = across + tl.sum(read, axis=0) - tl.cumsum(read, axis=0) + read + tl.cumsum(write, axis=0) - write
    ddt = tl.sum(x32 * dX, axis=1) + A * da
    tl.store(ddt_ptr + (batch * T + rows) * H + h, ddt.to(ddt_ptr.dtype.element_ty), mask=rows < T)
    slot = slots_ptr + 2 * ((batch * chunks + c) * H + h)
    tl.store(slot, tl.sum(dt * da, axis=0))
    tl.store(slot + 1, tl.sum(tl.sum(dy32 * x32, axis=1), axis=0))


@triton.jit
def sum_slots_kernel(slots_ptr, dA_ptr, dD_ptr, count, H, BLOCK: tl.constexpr):
    h = tl.program_id(0)
    dA = tl.zeros([BLOCK], dtype=tl.float32)
    dD = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dA += tl.load(slots_ptr + 2 * (i * H + h), mask=i < count, other=0.0)
        dD += tl.load(slots_ptr + 2 * (i * H + h) + 1, mask=i < count, other=0.0)
    tl.store(dA_ptr + h, tl.sum(dA, axis=0).to(dA_ptr.dtype.element_ty))
    tl.store(dD_ptr + h, tl.sum(dD, axis=0).to(dD_ptr.dtype.element_ty))


@triton.jit
def shared_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, state_ptr, r_ptr, dy_ptr, dB_ptr, dC_ptr, T, H, P, N, chunks,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dB and dC of a chunk, from all heads."""
    c, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = c * CHUNK + tl.arange(0, CHUNK)
    n, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    W = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dB = tl.zeros([CHUNK, BLOCK_N], dtype=tl.float32)
    dC = tl.zeros([CHUNK, BLOCK_N], dtype=tl.float32)
    for h in range(H):
        A = tl.load(A_ptr + h).to(tl.float32)
        dt, sums, total = load_decay(dt_ptr + batch * T * H + h, A, rows, T, H)
        head = (batch * T * H + h) * P
        x = load_tile(x_ptr + head, rows, p, T, P, H * P)
        dy = load_tile(dy_ptr + head, rows, p, T, P, H * P)
        place = ((batch * H + h) * chunks + c) * N * P
        state = load_tile(state_ptr + place, n, p, N, P, P).to(x.dtype)
        r = load_tile(r_ptr + place, n, p, N, P, P).to(x.dtype)
        X = x.to(tl.float32) * dt[:, None]
        W += tl.dot(dy, tl.trans(X.to(x.dtype)), input_precision=PRECISION) * decay_tile(sums, CHUNK)
        decayed = (dy.to(tl.float32) * tl.exp(sums)[:, None]).to(dy.dtype)
        dC = tl.dot(decayed, tl.trans(state), dC, input_precision=PRECISION)
        decayed = (X * tl.exp(total - sums)[:, None]).to(x.dtype)
        dB = tl.dot(decayed, tl.trans(r), dB, input_precision=PRECISION)
    B = load_tile(B_ptr + batch * T * N, rows, n, T, N, N)
    C = load_tile(C_ptr + batch * T * N, rows, n, T, N, N)
    W = W.to(B.dtype)
    dC = tl.dot(W, B, dC, input_precision=PRECISION)
    dB = tl.dot(tl.trans(W), C, dB, input_precision=PRECISION)
    store_tile(dC_ptr + batch * T * N, dC, rows, n, T, N, N)
    store_tile(dB_ptr + batch * T * N, dB, rows, n, T, N, N)


class SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D):
        inputs = tuple(tensor.contiguous() for tensor in (x, dt, A, B, C, D))
        ctx.save_for_backward(*inputs)
        return ssd(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, dt, A, B, C, D = ctx.saved_tensors
        dy = dy.contiguous()
        (Bt, T, H, P), N = x.shape, B.shape[2]
        tiles, needed = tiling(x, B), ctx.needs_input_grad
        state, r = launch_states(B, x, dt, A, False), launch_states(C, dy, dt, A, True)
        chunks = state.shape[2]
        sizes = (T, H, P, N, chunks)
        grads = [torch.empty_like(tensor) for tensor in (x, dt, A, B, C, D)]
        dx, ddt, dA, dB, dC, dD = grads
        if needed[0] or needed[1] or needed[2] or needed[5]:
            slots = torch.empty((Bt * chunks, H, 2), device=x.device, dtype=torch.float32)
            head_kernel[(chunks, Bt * H)](x, dt, A, B, C, D, state, r, dy, dx, ddt, slots, *sizes, **tiles)
            sum_slots_kernel[(H,)](slots, dA, dD, Bt * chunks, H, BLOCK=64)
        if needed[3] or needed[4]:
            shared_kernel[(chunks, Bt)](x, dt, A, B, C, state, r, dy, dB, dC, *sizes, **tiles)
        return tuple(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True))


def ssd_autograd(x, dt, A, B, C, D):
    return SSD.apply(x, dt, A, B, C, D)
