"""Attention with sparse weights: 1.5-entmax in the place of softmax, rows of up to 256 keys.

Forward    Z = (s / 2) Q K^T,  P_ij = (Z_ij - tau_i)^2 where Z_ij > tau_i, else 0, with tau_i such that
           sum_j P_ij = 1;  O = P V
Backward   with g_ij = Z_ij - tau_i on the row's support:  P = g^2,  dP = dO V^T,
           and sum_j g_ij^2 = 1 gives  dtau_i / dZ_ij = g_ij / sum_l g_il,  so
           dZ_ij = 2 g_ij (dP_ij - c_i),  c_i = sum_j g_ij dP_ij / sum_j g_ij,
           dQ = (s / 2) dZ K,  dK = (s / 2) dZ^T Q,  dV = P^T dO

Forward schedule: the threshold needs a row whole, so a program owns a tile of queries and has all keys in one
tile. It halves an interval that holds tau until the support is settled; then tau follows from the support in
closed form: with n keys of mean a and sum of squared deviations b, tau = a - sqrt((1 - b) / n). That makes
the sum 1 to rounding, and gives the forward a derivative: the halving alone, all comparisons, has none. tau
is saved; it says all of P that Z does not.
Backward schedule: the query's owner rebuilds its row of g from Z and tau, has c by two row sums, and stores
it for the others; that takes the place of delta, <dO, O> being another number here. Then the keys' owners, a
tile of keys each, walk the queries with tau and c at hand, for dK and dV. Outside of the support all is 0.

op: entmax_attention
schedule: row_reduce_correct, swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q, N):
    """Tiles and the precision of dots: all keys are one tile."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_N, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in (N, q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK_M": 16, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def threshold(z):
    """tau of each row; z is -1e30 where there is no key."""
    high = tl.max(z, axis=1)  # tau is between the greatest, less one, and the greatest
    low = high - 1.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        g = tl.where(z > middle[:, None], z - middle[:, None], 0.0)
        enough = tl.sum(g * g, axis=1) >= 1.0
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    support = z > low[:, None]
    n = tl.sum(tl.where(support, 1.0, 0.0), axis=1)
    a = tl.sum(tl.where(support, z, 0.0), axis=1) / n
    deviation = tl.where(support, z - a[:, None], 0.0)
    return a - tl.sqrt((1.0 - tl.sum(deviation * deviation, axis=1)) / n)


@triton.jit
def half_scores(q, k, cols, N, scale, PRECISION: tl.constexpr):
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (0.5 * scale)
    return tl.where(cols[None, :] < N, z, -1e30)


@triton.jit
def above(z, tau):
    return tl.where(z > tau[:, None], z - tau[:, None], 0.0)


@triton.jit
def entmax_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, tau_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, cols = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    k = load_tile(k_ptr + head * N * D, cols, d, N, D)
    z = half_scores(q, k, cols, N, scale, PRECISION)
    tau = threshold(z)
    g = above(z, tau)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    store_tile(o_ptr + head * M * D, tl.dot(g * g, v, input_precision=PRECISION), rows, d, M, D)
    tl.store(tau_ptr + head * M + rows, tau, mask=rows < M)


def entmax_forward(q, k, v):
    (B, H, M, D), N = q.shape, k.shape[2]
    if k.shape != (B, H, N, D) or v.shape != k.shape or N == 0:
        raise ValueError("k and v do not fit q, or there are no keys")
    if N > 256 or D > 64:
        raise ValueError(f"{N} keys of dimension {D} do not fit one tile")
    o, tau = torch.empty_like(q), q.new_empty((B, H, M))
    grid = (triton.cdiv(M, 16), B * H)
    entmax_kernel[grid](q, k, v, o, tau, M, N, D, D**-0.5, **tiling(q, N))
    return o, tau


@autodiff(inputs_require_grad=(0, 1, 2))
def entmax_attention(q, k, v):
    """q: (batch, heads, M, dim); k, v: (batch, heads, N, dim), N from 1 to 256."""
    return entmax_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    z = 0.5 * q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)
    top = z.sort(dim=-1, descending=True).values  # the support is the n greatest, for the largest n that fits
    n = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean = top.cumsum(-1) / n
    spread = top.pow(2).cumsum(-1) - n * mean.pow(2)
    tau = mean - ((1 - spread) / n).clamp(min=0).sqrt()
    size = (tau <= top).sum(-1, keepdim=True)
    return (z - tau.gather(-1, size - 1)).clamp(min=0).pow(2) @ v


SWEEP = [
    {"B": 16, "H": 8, "M": 256, "N": 256, "D": 64},
    {"B": 8, "H": 12, "M": 197, "N": 131, "D": 32},
]
SWEEP_CPU = [{"B": 1, "H": 2, "M": 22, "N": 40, "D": 16}, {"B": 2, "H": 1, "M": 17, "N": 9, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, M, N, D = (dims[key] for key in ("B", "H", "M", "N", "D"))
    q = torch.randn(B, H, M, D, device=device, dtype=dtype)
    return q, *(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, tau_ptr, c_ptr, dq_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows, cols = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * M * D, rows, d, M, D)
    do = load_tile(do_ptr + head * M * D, rows, d, M, D)
    k = load_tile(k_ptr + head * N * D, cols, d, N, D)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    tau = tl.load(tau_ptr + head * M + rows, mask=rows < M, other=-1.0)
    g = above(half_scores(q, k, cols, N, scale, PRECISION), tau)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    c = tl.sum(g * dp, axis=1) / tl.sum(g, axis=1)
    tl.store(c_ptr + head * M + rows, c, mask=rows < M)
    dz = 2.0 * g * (dp - c[:, None])
    dq = tl.dot(dz, k, input_precision=PRECISION) * (0.5 * scale)
    store_tile(dq_ptr + head * M * D, dq, rows, d, M, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, tau_ptr, c_ptr, dk_ptr, dv_ptr, M, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * N * D, cols, d, N, D)
    v = load_tile(v_ptr + head * N * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * M * D, rows, d, M, D)
        do = load_tile(do_ptr + head * M * D, rows, d, M, D)
        tau = tl.load(tau_ptr + head * M + rows, mask=rows < M, other=0.0)  # without a query g is 0
        c = tl.load(c_ptr + head * M + rows, mask=rows < M, other=0.0)
        g = above(half_scores(q, k, cols, N, scale, PRECISION), tau)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dz = 2.0 * g * (dp - c[:, None])
        dv = tl.dot(tl.trans(g * g), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dz), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * N * D, dk * (0.5 * scale), cols, d, N, D)
    store_tile(dv_ptr + head * N * D, dv, cols, d, N, D)


class EntmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, tau = entmax_forward(q, k, v)
        ctx.save_for_backward(q, k, v, tau)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, tau = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, M, D), N, tiles = q.shape, k.shape[2], tiling(q, k.shape[2])
        dq, c = torch.empty_like(q), torch.empty_like(tau)
        query_kernel[(triton.cdiv(M, 16), B * H)](q, k, v, do, tau, c, dq, M, N, D, D**-0.5, **tiles)
        dk = dv = None
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(triton.cdiv(N, 32), B * H)](
                q, k, v, do, tau, c, dk, dv, M, N, D, D**-0.5,
                PRECISION=tiles["PRECISION"], BLOCK=32, BLOCK_D=tiles["BLOCK_D"],
            )  # fmt: skip
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None


def entmax_attention_autograd(q, k, v):
    return EntmaxAttention.apply(q, k, v)
