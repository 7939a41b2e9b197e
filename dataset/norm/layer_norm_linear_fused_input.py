"""Layer norm and the linear layer after it; the product normalises its input as it loads it.

Forward    xhat_i = (x_i - mu_i) r_i,  r_i = (var_i + eps)^(-1/2),  a = xhat * g + b,  Y = a W^T + c
Backward   dW = dY^T a,  dc_n = sum_i dY_in,  H = dY W (the gradient of a),
           dg_k = sum_i H_ik xhat_ik,  db_k = sum_i H_ik,
           dx_i = r_i (H_i * g - p_i - xhat_i q_i),  p_i = mean_k H_ik g_k,  q_i = mean_k H_ik g_k xhat_ik

Forward schedule: a program a row makes mu and r; then a program owns a tile of Y, and turns each tile of x
into a tile of a on its way to the dot. a is never stored.
Backward schedule: a is not there to be read, so the owner of a tile of dW makes it again from x, mu and r;
those of the first column also sum dY for dc. H has to be stored, as p and q need its whole rows. But while
the owner of a tile of H has it in registers, it takes all four sums of it: over its columns for p and q, over
its rows for dg and db, each into a slot of the tile. So what is left reads H once: the owner of a row of dx
adds the few slots of its p and q and corrects. Without the slots that would be three reads of H.

op: layer_norm_linear
schedule: swap_owner, row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_vector(ptr, i, size):
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def normalised_tile(x_ptr, mu, r, rows, k, M, K):
    """The tile (rows, k) of xhat in float32; anything finite outside."""
    return (load_tile(x_ptr, rows, k, M, K).to(tl.float32) - mu[:, None]) * r[:, None]


@triton.jit
def statistics_kernel(x_ptr, mu_ptr, r_ptr, K, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        total += load_vector(x_ptr + row * K, start + tl.arange(0, BLOCK), K)
    mu = tl.sum(total, axis=0) / K
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        centred = tl.where(k < K, load_vector(x_ptr + row * K, k, K) - mu, 0.0)
        squares += centred * centred
    tl.store(mu_ptr + row, mu)
    tl.store(r_ptr + row, tl.rsqrt(tl.sum(squares, axis=0) / K + eps))


@triton.jit
def norm_linear_kernel(
    x_ptr, mu_ptr, r_ptr, g_ptr, b_ptr, W_ptr, c_ptr, y_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mu, r = load_vector(mu_ptr, rows, M), load_vector(r_ptr, rows, M)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        xhat = normalised_tile(x_ptr, mu, r, rows, k, M, K)
        a = xhat * load_vector(g_ptr, k, K)[None, :] + load_vector(b_ptr, k, K)[None, :]
        W = load_tile(W_ptr, n, k, N, K)
        y = tl.dot(a.to(W.dtype), tl.trans(W), y, input_precision=PRECISION)
    store_tile(y_ptr, y + load_vector(c_ptr, n, N)[None, :], rows, n, M, N)


def norm_linear_forward(x, g, b, W, c, eps):
    (M, K), N, tiles = x.shape, W.shape[0], tiling(x)
    if W.shape[1] != K or g.shape != (K,) or b.shape != (K,) or c.shape != (N,):
        raise ValueError(f"rows of {K} need g and b of {K}, W of {K} columns, c of its rows")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    mu = torch.empty(M, device=x.device, dtype=torch.float32)
    r = torch.empty_like(mu)
    statistics_kernel[(M,)](x, mu, r, K, eps, BLOCK=1024)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    norm_linear_kernel[grid](x, mu, r, g, b, W, c, y, M, N, K, **tiles)
    return y, mu, r


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def layer_norm_linear(x, g, b, W, c, eps=1e-5):
    """x: (M, K); g, b: (K), scale and shift of the norm; W: (N, K); c: (N); gives (M, N)."""
    return norm_linear_forward(*(t.contiguous() for t in (x, g, b, W, c)), eps)[0]


def reference(x, g, b, W, c, eps=1e-5):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], g, b, eps) @ W.t() + c


SWEEP = [{"M": 4096, "N": 4096, "K": 2048}, {"M": 1021, "N": 2304, "K": 768}]
SWEEP_CPU = [{"M": 40, "N": 36, "K": 50}, {"M": 7, "N": 70, "K": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N, K = dims["M"], dims["N"], dims["K"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    g = 1 + 0.2 * torch.randn(K, device=device, dtype=dtype)
    b = 0.1 * torch.randn(K, device=device, dtype=dtype)
    W = torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, g, b, W, torch.randn(N, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def h_kernel(
    x_ptr, mu_ptr, r_ptr, g_ptr, W_ptr, dy_ptr, h_ptr, row_slots_ptr, column_slots_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of H, with its part of (K p, K q) a row and of (dg, db) a column."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, rows, n, M, N)
        h = tl.dot(dy, load_tile(W_ptr, n, k, N, K), h, input_precision=PRECISION)
    store_tile(h_ptr, h, rows, k, M, K)
    xhat = normalised_tile(x_ptr, load_vector(mu_ptr, rows, M), load_vector(r_ptr, rows, M), rows, k, M, K)
    column_slots_ptr += tl.program_id(0) * 2 * K
    tl.store(column_slots_ptr + k, tl.sum(h * xhat, axis=0), mask=k < K)
    tl.store(column_slots_ptr + K + k, tl.sum(h, axis=0), mask=k < K)
    hg = h * load_vector(g_ptr, k, K)[None, :]
    row_slots_ptr += tl.program_id(1) * 2 * M
    tl.store(row_slots_ptr + rows, tl.sum(hg, axis=1), mask=rows < M)
    tl.store(row_slots_ptr + M + rows, tl.sum(hg * xhat, axis=1), mask=rows < M)


@triton.jit
def dx_kernel(
    x_ptr, mu_ptr, r_ptr, g_ptr, h_ptr, row_slots_ptr, dx_ptr, M, K, slots,
    BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p = tl.zeros([BLOCK_S], dtype=tl.float32)
    q = tl.zeros([BLOCK_S], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        p += tl.load(row_slots_ptr + s * 2 * M + row, mask=s < slots, other=0.0)
        q += tl.load(row_slots_ptr + (s * 2 + 1) * M + row, mask=s < slots, other=0.0)
    p_mean, q_mean = tl.sum(p, axis=0) / K, tl.sum(q, axis=0) / K
    mu, r = tl.load(mu_ptr + row), tl.load(r_ptr + row)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        xhat = (load_vector(x_ptr + row * K, k, K) - mu) * r
        hg = load_vector(h_ptr + row * K, k, K) * load_vector(g_ptr, k, K)
        dx = r * (hg - p_mean - xhat * q_mean)
        tl.store(dx_ptr + row * K + k, dx.to(dx_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def sum_slots_kernel(slots_ptr, dg_ptr, db_ptr, slots, K, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dg = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dg += load_vector(slots_ptr + slot * 2 * K, k, K)
        db += load_vector(slots_ptr + slot * 2 * K + K, k, K)
    tl.store(dg_ptr + k, dg.to(dg_ptr.dtype.element_ty), mask=k < K)
    tl.store(db_ptr + k, db.to(db_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def matrix_kernel(
    x_ptr, mu_ptr, r_ptr, g_ptr, b_ptr, dy_ptr, dW_ptr, dc_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, b = load_vector(g_ptr, k, K), load_vector(b_ptr, k, K)
    dW = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mu, r = load_vector(mu_ptr, rows, M), load_vector(r_ptr, rows, M)
        a = normalised_tile(x_ptr, mu, r, rows, k, M, K) * g[None, :] + b[None, :]
        dy = load_tile(dy_ptr, rows, n, M, N)
        dW = tl.dot(tl.trans(dy), a.to(dy.dtype), dW, input_precision=PRECISION)
        dc += tl.sum(dy.to(tl.float32), axis=0)
    store_tile(dW_ptr, dW, n, k, N, K)
    if tl.program_id(1) == 0:
        tl.store(dc_ptr + n, dc.to(dc_ptr.dtype.element_ty), mask=n < N)


class LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, b, W, c, eps):
        x, g, b, W, c = (t.contiguous() for t in (x, g, b, W, c))
        y, mu, r = norm_linear_forward(x, g, b, W, c, eps)
        ctx.save_for_backward(x, g, b, W, c, mu, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, g, b, W, c, mu, r = ctx.saved_tensors
        dy = dy.contiguous()
        (M, K), N, tiles = x.shape, W.shape[0], tiling(x)
        down, across, outputs = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, K, N))
        needs = ctx.needs_input_grad
        dx = dg = db = dW = dc = None
        if any(needs[:3]):
            h, row_slots, column_slots = (
                torch.empty(shape, device=x.device, dtype=torch.float32)
                for shape in ((M, K), (across, 2, M), (down, 2, K))
            )
            h_kernel[(down, across)](x, mu, r, g, W, dy, h, row_slots, column_slots, M, N, K, **tiles)
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(M,)](x, mu, r, g, h, row_slots, dx, M, K, across, BLOCK_S=32, BLOCK=1024)
        if needs[1] or needs[2]:
            dg, db = torch.empty_like(g), torch.empty_like(b)
            sum_slots_kernel[(triton.cdiv(K, 64),)](column_slots, dg, db, down, K, BLOCK=64)
        if needs[3] or needs[4]:
            dW, dc = torch.empty_like(W), torch.empty_like(c)
            matrix_kernel[(outputs, across)](x, mu, r, g, b, dy, dW, dc, M, N, K, **tiles)
        grads = dx, dg, db, dW, dc
        return *(grad if need else None for grad, need in zip(grads, needs[:5], strict=True)), None


def layer_norm_linear_autograd(x, g, b, W, c, eps=1e-5):
    return LayerNormLinear.apply(x, g, b, W, c, eps)
