"""Linear layer with a frozen weight and a low-rank correction that is trained.

Forward    U = X A,   Y = X W + s U B      X (M, K), W (K, N) frozen, A (K, r), B (r, N)
Backward   V = dY B^T,   dX = dY W^T + s V A^T,   dA = s X^T V,   dB = s U^T dY.  W gets no gradient.

Forward schedule: a thin kernel makes U; the owner of a tile of Y walks K for X W and adds s U B, one more dot
of depth r, to the same accumulator. U (M r numbers) is saved, it is the input of dB.
Backward schedule: the mirror image. A thin kernel makes V, which stands in two gradients, by owners of rows
that walk N. The owner of a tile of dX walks N for dY W^T and adds s V A^T in its epilogue: dX is
written once and never read back. dA and dB are long sums over M with few outputs (K r and r N), too few
owners for a GPU if each walks all of M: the rows are split, every (tile, split) stores a partial, and a
second kernel adds the splits. One kernel serves both, for both are L^T R with one side r wide. W
gets no product at all, which is half of the work of a full backward.

op: lora_linear
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPLIT = 512  # rows of one partial of dA and dB


def precision():
    """Of dots."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_factor(ptr, rows, cols, R, C, TRANSPOSED: tl.constexpr):
    """Tile (rows, cols) of an R x C matrix, which is stored transposed if TRANSPOSED."""
    if TRANSPOSED:
        return tl.trans(load_tile(ptr, cols, rows, C, R))
    return load_tile(ptr, rows, cols, R, C)


@triton.jit
def thin_kernel(
    x_ptr, a_ptr, u_ptr, M, K, RANK,
    PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """U = X A, or X A^T if TRANSPOSED."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    u = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = load_factor(a_ptr, k, r, K, RANK, TRANSPOSED)
        u = tl.dot(load_tile(x_ptr, m, k, M, K), a, u, input_precision=PRECISION)
    store_tile(u_ptr, u, m, r, M, RANK)


@triton.jit
def wide_kernel(
    x_ptr, w_ptr, u_ptr, b_ptr, y_ptr, M, N, K, RANK, scale,
    PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Y = X W + scale U B, or with W^T and B^T if TRANSPOSED."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    u = load_tile(u_ptr, m, r, M, RANK)
    acc = tl.dot(u, load_factor(b_ptr, r, n, RANK, N, TRANSPOSED), input_precision=PRECISION) * scale
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_factor(w_ptr, k, n, K, N, TRANSPOSED)
        acc = tl.dot(load_tile(x_ptr, m, k, M, K), w, acc, input_precision=PRECISION)
    store_tile(y_ptr, acc, m, n, M, N)


def blocks(rank, transposed):
    """Tiles, the precision of dots, and how the factors are stored."""
    return {
        "PRECISION": precision(),
        "TRANSPOSED": transposed,
        "BLOCK_M": 64,
        "BLOCK_K": 32,
        "BLOCK_R": max(16, triton.next_power_of_2(rank)),
    }


def thin_product(x, a, rank, transposed):
    """X A, where A is stored transposed if transposed."""
    M, K = x.shape
    u = torch.empty((M, rank), device=x.device, dtype=x.dtype)
    thin_kernel[(triton.cdiv(M, 64),)](x, a, u, M, K, rank, **blocks(rank, transposed))
    return u


def wide_product(x, w, u, b, scale, transposed):
    """X W + scale U B, where W and B are stored transposed if transposed."""
    (M, K), rank, N = x.shape, u.shape[1], w.shape[0 if transposed else 1]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    wide_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 64))](
        x, w, u, b, y, M, N, K, rank, scale, BLOCK_N=64, **blocks(rank, transposed)
    )
    return y


def lora_linear_forward(x, w, a, b, scale):
    (K, N), rank = w.shape, a.shape[1]
    if x.shape[1] != K or a.shape[0] != K or b.shape != (rank, N):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}")
    if rank > 128:
        raise ValueError(f"rank {rank} does not fit one tile")
    u = thin_product(x, a, rank, False)
    return wide_product(x, w, u, b, scale, False), u


@autodiff(inputs_require_grad=(0, 2, 3))
def lora_linear(x, w, a, b, scale):
    """x: (M, K); w: (K, N), frozen; a: (K, r); b: (r, N)."""
    return lora_linear_forward(x.contiguous(), w.contiguous(), a.contiguous(), b.contiguous(), scale)[0]


def reference(x, w, a, b, scale):
    return x @ w + scale * (x @ a) @ b


SWEEP = [{"M": 4096, "K": 4096, "N": 4096, "R": 16}, {"M": 2047, "K": 2048, "N": 5632, "R": 64}]
SWEEP_CPU = [{"M": 35, "K": 48, "N": 40, "R": 16}, {"M": 530, "K": 33, "N": 20, "R": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N, R = dims["M"], dims["K"], dims["N"], dims["R"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = torch.randn(K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    a = torch.randn(K, R, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, w, a, torch.randn(R, N, device=device, dtype=dtype), 0.5


# ---- backward ----


@triton.jit
def partial_kernel(
    left_ptr, right_ptr, slots_ptr, M, P, Q, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """slots[split] = L^T R over the rows of a split, L (M, P), R (M, Q)."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.float32)
    for start in range(0, SPLIT, BLOCK_M):
        m = split * SPLIT + start + tl.arange(0, BLOCK_M)
        left = load_tile(left_ptr, m, p, M, P)
        right = load_tile(right_ptr, m, q, M, Q)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
    store_tile(slots_ptr + split.to(tl.int64) * P * Q, acc, p, q, P, Q)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, (acc * scale).to(out_ptr.dtype.element_ty), mask=i < size)


def transposed_product(left, right, scale):
    """scale L^T R, in the dtype of L."""
    (M, P), Q = left.shape, right.shape[1]
    splits = triton.cdiv(M, SPLIT)
    slots = torch.empty((splits, P, Q), device=left.device, dtype=torch.float32)
    out = torch.empty((P, Q), device=left.device, dtype=left.dtype)
    tiles = {"PRECISION": precision(), "BLOCK_M": 32, "BLOCK_P": 32, "BLOCK_Q": 32}
    partial_kernel[(triton.cdiv(P, 32), triton.cdiv(Q, 32), splits)](
        left, right, slots, M, P, Q, SPLIT=SPLIT, **tiles
    )
    sum_slots_kernel[(triton.cdiv(P * Q, 256),)](slots, out, splits, P * Q, scale, BLOCK=256)
    return out


class LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, a, b, scale):
        x, w, a, b = x.contiguous(), w.contiguous(), a.contiguous(), b.contiguous()
        y, u = lora_linear_forward(x, w, a, b, scale)
        ctx.save_for_backward(x, w, a, b, u)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, a, b, u = ctx.saved_tensors
        dy = dy.contiguous()
        needs = ctx.needs_input_grad
        dx = da = db = None
        if needs[0] or needs[2]:
            v = thin_product(dy, b, u.shape[1], True)
        if needs[0]:
            dx = wide_product(dy, w, v, a, ctx.scale, True)
        if needs[2]:
            da = transposed_product(x, v, ctx.scale)
        if needs[3]:
            db = transposed_product(u, dy, ctx.scale)
        return dx, None, da, db, None


def lora_linear_autograd(x, w, a, b, scale):
    return LoraLinear.apply(x, w, a, b, scale)
