"""Linear layer with bias, a learned scale for each output, and the residual: the end of a vision block.

Forward    Z = X W^T + b,   Y = R + s * Z;   X (M, K), W (N, K), b, s (N), R (M, N)
Backward   dR = dY,   dX = (s * dY) W.   With E = dY^T X and e_n = sum_m dY_mn:
           dW_nk = s_n E_nk,   db_n = s_n e_n,   ds_n = sum_m dY_mn Z_mn = sum_k E_nk W_nk + b_n e_n

Forward schedule: a program owns a tile of Y, walks K, and adds bias, scale and residual in its epilogue; Z is
never stored.
Backward schedule: ds looks as if it needed Z, a saved tensor or a product to repeat. Written out it is a dot
of E's row with W's, and E is what dW's owners hold before they scale it: each multiplies its tile with the
same tile of W, sums along k, and stores the share in a slot, (tile of k, n). The owners of the first tile of
k add e as they walk the rows, and the kernel that adds the slots has db and ds in its hands. No division by
s, which starts near 0 or at 0. dX's owners scale dY's columns on load; those of the first tile of k store the
copy dR that they have loaded anyway.

op: linear_layer_scale
schedule: swap_owner, partials_then_reduce
difficulty: 4
dtypes: fp32, fp16, bf16
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
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(ptr, n, N):
    return tl.load(ptr + n, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def layer_scale_kernel(
    x_ptr, w_ptr, b_ptr, s_ptr, r_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = tl.trans(load_tile(w_ptr, n, k, N, K))
        z = tl.dot(load_tile(x_ptr, m, k, M, K), w, z, input_precision=PRECISION)
    y = load_row(s_ptr, n, N)[None, :] * (z + load_row(b_ptr, n, N)[None, :])
    store_tile(y_ptr, y + load_tile(r_ptr, m, n, M, N).to(tl.float32), m, n, M, N)


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def linear_layer_scale(x, w, b, s, r):
    """x: (M, K); w: (N, K); b, s: (N); r: (M, N); gives (M, N)."""
    (M, K), N, tiles = x.shape, w.shape[0], tiling(x)
    if w.shape[1] != K or b.shape != (N,) or s.shape != (N,) or r.shape != (M, N):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, s {tuple(s.shape)}, r {tuple(r.shape)}")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    tensors = [t.contiguous() for t in (x, w, b, s, r)]
    layer_scale_kernel[grid](*tensors, y, M, N, K, **tiles)
    return y


def reference(x, w, b, s, r):
    return r + s * torch.nn.functional.linear(x, w, b)


SWEEP = [{"M": 8192, "K": 4096, "N": 1024}, {"M": 4095, "K": 1500, "N": 384}]
SWEEP_CPU = [{"M": 41, "K": 26, "N": 38}, {"M": 20, "K": 70, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = dims["M"], dims["K"], dims["N"]
    x, r = (torch.randn(M, size, device=device, dtype=dtype) for size in (K, N))
    w = torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5
    b, s = (torch.randn(N, device=device, dtype=dtype) for _ in range(2))
    return x, w, b, 0.1 * s, r


# ---- backward ----


@triton.jit
def dx_dr_kernel(dy_ptr, w_ptr, s_ptr, dx_ptr, dr_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    copies = tl.where(tl.program_id(1) == 0, M, 0)  # rows that this program copies
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, n, M, N)
        store_tile(dr_ptr, dy, m, n, copies, N)
        scaled = (dy.to(tl.float32) * load_row(s_ptr, n, N)[None, :]).to(dy.dtype)
        dx = tl.dot(scaled, load_tile(w_ptr, n, k, N, K), dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, m, k, M, K)


@triton.jit
def dw_kernel(
    dy_ptr, x_ptr, w_ptr, s_ptr, dw_ptr, ds_slots_ptr, e_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    E = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    e = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, n, M, N)
        E = tl.dot(tl.trans(dy), load_tile(x_ptr, m, k, M, K), E, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            e += tl.sum(dy.to(tl.float32), axis=0)
    store_tile(dw_ptr, load_row(s_ptr, n, N)[:, None] * E, n, k, N, K)
    share = tl.sum(E * load_tile(w_ptr, n, k, N, K).to(tl.float32), axis=1)
    tl.store(ds_slots_ptr + tl.program_id(1) * N + n, share, mask=n < N)
    if tl.program_id(1) == 0:
        tl.store(e_ptr + n, e, mask=n < N)


@triton.jit
def db_ds_kernel(b_ptr, s_ptr, ds_slots_ptr, e_ptr, db_ptr, ds_ptr, slots, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(e_ptr + n, mask=n < N, other=0.0)
    ds = load_row(b_ptr, n, N) * e
    for slot in range(slots):
        ds += tl.load(ds_slots_ptr + slot * N + n, mask=n < N, other=0.0)
    tl.store(db_ptr + n, (load_row(s_ptr, n, N) * e).to(db_ptr.dtype.element_ty), mask=n < N)
    tl.store(ds_ptr + n, ds.to(ds_ptr.dtype.element_ty), mask=n < N)


class LinearLayerScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, s, r):
        x, w, b, s = x.contiguous(), w.contiguous(), b.contiguous(), s.contiguous()
        ctx.save_for_backward(x, w, b, s)
        return linear_layer_scale(x, w, b, s, r)

    @staticmethod
    def backward(ctx, dy):
        x, w, b, s = ctx.saved_tensors
        dy, (M, K), N, tiles, needs = dy.contiguous(), x.shape, w.shape[0], tiling(x), ctx.needs_input_grad
        rows, cols, deep = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        deep = max(1, deep)  # the first tiles of k have more to do than k
        dx, dw, db, ds, dr = (torch.empty_like(t) for t in (x, w, b, s, dy))
        if needs[0] or needs[4]:
            grid = (rows, deep if needs[0] else 1)
            dx_dr_kernel[grid](dy, w, s, dx, dr, M, N, K, **tiles)
        if needs[1] or needs[2] or needs[3]:
            slots, e = (torch.empty(d, device=x.device, dtype=torch.float32) for d in ((deep, N), (N,)))
            dw_kernel[(cols, deep)](dy, x, w, s, dw, slots, e, M, N, K, **tiles)
            db_ds_kernel[(triton.cdiv(N, 64),)](b, s, slots, e, db, ds, deep, N, BLOCK=64)
        grads = (dx, dw, db, ds, dr)
        return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


def linear_layer_scale_autograd(x, w, b, s, r):
    return LinearLayerScale.apply(x, w, b, s, r)
