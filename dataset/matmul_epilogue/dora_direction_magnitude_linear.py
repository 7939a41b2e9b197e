"""DoRA: a frozen weight with a low-rank correction gives directions, a trained vector lengths.

Forward    T = W + s A B,   n_j = |T_j| the length of column j,   H = X T / n,   Y = m * H
           X (M, K), W (K, N) frozen, A (K, r), B (r, N), m (N)
Backward   dm_j = sum_i dY_ij H_ij.  With c = m / n, dP = c * dY is the gradient of P = X T, and n_j has
           dn_j = -(m_j / n_j) dm_j along T_j / n_j:   dT = X^T dP - T diag(k),  k_j = m_j dm_j / n_j^2.
           dX = dP T^T = dP W^T + s V A^T with V = dP B^T,   dA = s dT B^T = s (X^T V - T diag(k) B^T),
           dB = s A^T dT = s (U^T dP - A^T T diag(k)) with U = X A

Forward schedule: owners of columns walk T for n, making its tiles from W and one dot of depth r; T is never
stored. A thin kernel makes U, and the owner of a tile of Y walks K for X W, adds s U B, divides by n for H,
which is kept with U, and multiplies with m.
Backward schedule: dT would be as large as W, two products of full size to be contracted with thin matrices
afterwards. Multiplied out, each term of dA and dB is thin from the start, so W gets no product of its own and
is only read. dm's owners, one a tile of columns, give c and k on the way. dA's owner has a tile of A's rows
and walks the rows of X for its first term, then T's columns for the second, in one accumulator; dB's owner
the same the other way round. dX is the forward's kernel shape again, V for U.

op: dora_linear
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(a, wide=False):
    """Tiles and the precision of dots: small for whole float32 numbers, and for thin results, so that these
    have owners enough."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 64 if wide and a.dtype != torch.float32 else 32
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_R": max(16, triton.next_power_of_2(a.shape[1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_scaled(ptr, scale_ptr, rows, cols, R, C):
    """A tile with column j times scale_j."""
    x = load_tile(ptr, rows, cols, R, C)
    scale = tl.load(scale_ptr + cols, mask=cols < C, other=0.0)
    return (x.to(tl.float32) * scale[None, :]).to(x.dtype)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def direction_tile(w_ptr, a_ptr, b_ptr, k, n, r, K, N, RANK, s, PRECISION: tl.constexpr):
    """Tile (k, n) of T = W + s A B, in float32."""
    a, b = load_tile(a_ptr, k, r, K, RANK), load_tile(b_ptr, r, n, RANK, N)
    return load_tile(w_ptr, k, n, K, N).to(tl.float32) + s * tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def length_kernel(
    w_ptr, a_ptr, b_ptr, n_ptr, K, N, RANK, s,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        t = direction_tile(w_ptr, a_ptr, b_ptr, k, n, r, K, N, RANK, s, PRECISION)
        squares += tl.sum(t * t, axis=0)
    tl.store(n_ptr + n, tl.sqrt(squares), mask=n < N)


@triton.jit
def thin_kernel(
    x_ptr, a_ptr, u_ptr, M, K, RANK, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """U = X A."""
    m, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    u = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, k, r, K, RANK)
        u = tl.dot(load_tile(x_ptr, m, k, M, K), a, u, input_precision=PRECISION)
    store_tile(u_ptr, u, m, r, M, RANK)


@triton.jit
def dora_kernel(
    x_ptr, w_ptr, u_ptr, b_ptr, m_ptr, n_ptr, h_ptr, y_ptr, M, K, N, RANK, s,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    i, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = load_tile(b_ptr, r, n, RANK, N)
    p = tl.dot(load_tile(u_ptr, i, r, M, RANK), b, input_precision=PRECISION) * s
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, k, n, K, N)
        p = tl.dot(load_tile(x_ptr, i, k, M, K), w, p, input_precision=PRECISION)
    h = p / tl.load(n_ptr + n, mask=n < N, other=1.0)[None, :]
    store_tile(h_ptr, h, i, n, M, N)
    store_tile(y_ptr, h * tl.load(m_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :], i, n, M, N)


def dora_forward(x, w, m, a, b, s):
    (M, K), N, RANK, tiles, wide = x.shape, w.shape[1], a.shape[1], tiling(a), tiling(a, True)
    if w.shape[0] != K or m.shape != (N,) or a.shape[0] != K or b.shape != (RANK, N) or RANK > 64:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}")
    n = torch.empty(N, device=x.device, dtype=torch.float32)
    u = torch.empty((M, RANK), device=x.device, dtype=x.dtype)
    h, y = (torch.empty((M, N), device=x.device, dtype=x.dtype) for _ in range(2))
    length_kernel[(triton.cdiv(N, 32),)](w, a, b, n, K, N, RANK, s, **tiles)
    thin_kernel[(triton.cdiv(M, 32),)](x, a, u, M, K, RANK, **tiles)
    grid = (triton.cdiv(M, wide["BLOCK"]), triton.cdiv(N, wide["BLOCK"]))
    dora_kernel[grid](x, w, u, b, m, n, h, y, M, K, N, RANK, s, **wide)
    return y, h, u, n


@autodiff(inputs_require_grad=(0, 2, 3, 4))
def dora_linear(x, w, m, a, b, s):
    """x: (M, K); w: (K, N), frozen; m: (N); a: (K, r); b: (r, N), r at most 64. No column of T may be 0."""
    tensors = [t.contiguous() for t in (x, w, m, a, b)]
    return dora_forward(*tensors, s)[0]


def reference(x, w, m, a, b, s):
    t = w + s * a @ b
    return m * (x @ t) / t.pow(2).sum(0).sqrt()


SWEEP = [{"M": 4096, "K": 2048, "N": 2048, "R": 16}, {"M": 2047, "K": 1000, "N": 3000, "R": 40}]
SWEEP_CPU = [{"M": 22, "K": 40, "N": 33, "R": 16}, {"M": 35, "K": 17, "N": 20, "R": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N, R = dims["M"], dims["K"], dims["N"], dims["R"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = torch.randn(K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    m = 1 + 0.2 * torch.randn(N, device=device, dtype=dtype)
    a = torch.randn(K, R, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, w, m, a, torch.randn(R, N, device=device, dtype=dtype) / max(1, R) ** 0.5, 0.5


# ---- backward ----


@triton.jit
def magnitude_kernel(
    dy_ptr, h_ptr, m_ptr, n_ptr, dm_ptr, c_ptr, k_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        dy = load_tile(dy_ptr, i, n, M, N).to(tl.float32)
        total += dy * load_tile(h_ptr, i, n, M, N).to(tl.float32)
    dm = tl.sum(total, axis=0)
    m = tl.load(m_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    length = tl.load(n_ptr + n, mask=n < N, other=1.0)
    tl.store(dm_ptr + n, dm.to(dm_ptr.dtype.element_ty), mask=n < N)
    tl.store(c_ptr + n, m / length, mask=n < N)
    tl.store(k_ptr + n, m * dm / (length * length), mask=n < N)


@triton.jit
def v_kernel(
    dy_ptr, c_ptr, b_ptr, v_ptr, M, N, RANK,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """V = dP B^T."""
    i, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    v = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        b = load_tile(b_ptr, r, n, RANK, N)
        v = tl.dot(load_scaled(dy_ptr, c_ptr, i, n, M, N), tl.trans(b), v, input_precision=PRECISION)
    store_tile(v_ptr, v, i, r, M, RANK)


@triton.jit
def dx_kernel(
    dy_ptr, c_ptr, w_ptr, v_ptr, a_ptr, dx_ptr, M, K, N, RANK, s,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    i, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.trans(load_tile(a_ptr, k, r, K, RANK))
    dx = tl.dot(load_tile(v_ptr, i, r, M, RANK), a, input_precision=PRECISION) * s
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        w = tl.trans(load_tile(w_ptr, k, n, K, N))
        dx = tl.dot(load_scaled(dy_ptr, c_ptr, i, n, M, N), w, dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, i, k, M, K)


@triton.jit
def da_kernel(
    x_ptr, v_ptr, w_ptr, a_ptr, b_ptr, k_ptr, da_ptr, M, K, N, RANK, s,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    k, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    da = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.trans(load_tile(x_ptr, i, k, M, K))
        da = tl.dot(x, load_tile(v_ptr, i, r, M, RANK), da, input_precision=PRECISION)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        t = direction_tile(w_ptr, a_ptr, b_ptr, k, n, r, K, N, RANK, s, PRECISION)
        b = load_scaled(b_ptr, k_ptr, r, n, RANK, N)
        da -= tl.dot(t.to(b.dtype), tl.trans(b), input_precision=PRECISION)
    store_tile(da_ptr, s * da, k, r, K, RANK)


@triton.jit
def db_kernel(
    u_ptr, dy_ptr, c_ptr, w_ptr, a_ptr, b_ptr, k_ptr, db_ptr, M, K, N, RANK, s,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    db = tl.zeros([BLOCK_R, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        u = tl.trans(load_tile(u_ptr, i, r, M, RANK))
        db = tl.dot(u, load_scaled(dy_ptr, c_ptr, i, n, M, N), db, input_precision=PRECISION)
    along = tl.zeros([BLOCK_R, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        t = direction_tile(w_ptr, a_ptr, b_ptr, k, n, r, K, N, RANK, s, PRECISION)
        a = tl.trans(load_tile(a_ptr, k, r, K, RANK))
        along = tl.dot(a, t.to(a.dtype), along, input_precision=PRECISION)
    db -= along * tl.load(k_ptr + n, mask=n < N, other=0.0)[None, :]
    store_tile(db_ptr, s * db, r, n, RANK, N)


class DoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, m, a, b, s):
        x, w, m, a, b = (t.contiguous() for t in (x, w, m, a, b))
        y, h, u, n = dora_forward(x, w, m, a, b, s)
        ctx.save_for_backward(x, w, m, a, b, h, u, n)
        ctx.s = s
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, m, a, b, h, u, n = ctx.saved_tensors
        dy, (M, K), N, RANK, s = dy.contiguous(), x.shape, w.shape[1], a.shape[1], ctx.s
        tiles, wide, needs = tiling(a), tiling(a, True), ctx.needs_input_grad
        rows, deep, cols = (triton.cdiv(size, 32) for size in (M, K, N))
        dm, c, k = torch.empty_like(m), torch.empty_like(n), torch.empty_like(n)
        magnitude_kernel[(cols,)](dy, h, m, n, dm, c, k, M, N, BLOCK_M=64, BLOCK_N=32)
        dx = da = db = None
        if needs[0] or needs[3]:
            v = torch.empty_like(u)
            v_kernel[(rows,)](dy, c, b, v, M, N, RANK, **tiles)
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, wide["BLOCK"]), triton.cdiv(K, wide["BLOCK"]))
            dx_kernel[grid](dy, c, w, v, a, dx, M, K, N, RANK, s, **wide)
        if needs[3]:
            da = torch.empty_like(a)
            da_kernel[(deep,)](x, v, w, a, b, k, da, M, K, N, RANK, s, **tiles)
        if needs[4]:
            db = torch.empty_like(b)
            db_kernel[(cols,)](u, dy, c, w, a, b, k, db, M, K, N, RANK, s, **tiles)
        return dx, None, dm if needs[2] else None, da, db, None


def dora_linear_autograd(x, w, m, a, b, s):
    return DoraLinear.apply(x, w, m, a, b, s)
