"""Linear layer with GELU, the preactivation saved.

Forward    Z = X W^T + b,  Y = gelu(Z),  gelu(z) = z Phi(z),   X (M, K), W (N, K), b (N)
Backward   dZ = dY * gelu'(Z),  gelu'(z) = Phi(z) + z phi(z)   (the normal distribution, its density)
           dX = dZ W,   dW = dZ^T X,   db_n = sum_m dZ_mn

Forward schedule: a program owns a tile of Z, walks K, and stores Z and Y from the same accumulator.
Backward schedule: dZ is never stored. Both products read it once per tile of theirs, and each makes it from
dY and Z as it loads them: an erf and an exp a number, hidden behind the product. Storing dZ would cost a
launch of its own, a write of M N and as many reads of dZ as now of (dY, Z); reading both instead doubles the
traffic of one operand, the shared one in cache. With Z saved there is no product to repeat. db rides in the
owners of dW with k tile 0, which have dZ^T in registers.

op: linear_act
schedule: swap_owner, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


def tiling():
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def linear_gelu_kernel(
    x_ptr, w_ptr, b_ptr, z_ptr, y_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, m, k, M, K)
        w = load_tile(w_ptr, n, k, N, K)
        z = tl.dot(x, tl.trans(w), z, input_precision=PRECISION)
    z += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    store_tile(z_ptr, z, m, n, M, N)
    store_tile(y_ptr, z * 0.5 * (1.0 + tl.erf(z * SQRT_HALF)), m, n, M, N)


def linear_gelu_forward(x, w, b):
    if x.shape[1] != w.shape[1] or b.shape[0] != w.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    (M, K), N = x.shape, w.shape[0]
    z = torch.empty((M, N), device=x.device, dtype=x.dtype)
    y = torch.empty_like(z)
    linear_gelu_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 64))](x, w, b, z, y, M, N, K, **tiling())
    return y, z


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_gelu(x, w, b):
    return linear_gelu_forward(x.contiguous(), w.contiguous(), b.contiguous())[0]


def reference(x, w, b):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))


SWEEP = [{"M": 8192, "K": 1024, "N": 4096}, {"M": 4095, "K": 768, "N": 3072}]
SWEEP_CPU = [{"M": 33, "K": 40, "N": 50}, {"M": 80, "K": 17, "N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype) / max(1, dims["K"]) ** 0.5
    return x, w, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_dz(dy_ptr, z_ptr, m, n, M, N):
    """A tile of dZ, in the dtype of dY; 0 outside, where dY is."""
    dy = load_tile(dy_ptr, m, n, M, N)
    z = load_tile(z_ptr, m, n, M, N).to(tl.float32)
    slope = 0.5 * (1.0 + tl.erf(z * SQRT_HALF)) + z * INV_SQRT_2PI * tl.exp(-0.5 * z * z)
    return dy.to(tl.float32) * slope


@triton.jit
def dx_kernel(
    dy_ptr, z_ptr, w_ptr, dx_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        w = load_tile(w_ptr, n, k, N, K)
        dz = load_dz(dy_ptr, z_ptr, m, n, M, N)
        acc = tl.dot(dz.to(w.dtype), w, acc, input_precision=PRECISION)
    store_tile(dx_ptr, acc, m, k, M, K)


@triton.jit
def dw_db_kernel(
    dy_ptr, z_ptr, x_ptr, dw_ptr, db_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    dw = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    db = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = load_tile(x_ptr, m, k, M, K)
        dz = load_dz(dy_ptr, z_ptr, m, n, M, N)
        dw = tl.dot(tl.trans(dz.to(x.dtype)), x, dw, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            db += tl.sum(dz, axis=0)
    store_tile(dw_ptr, dw, n, k, N, K)
    if tl.program_id(1) == 0:
        tl.store(db_ptr + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


class LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = x.contiguous(), w.contiguous()
        y, z = linear_gelu_forward(x, w, b.contiguous())
        ctx.save_for_backward(x, w, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, z = ctx.saved_tensors
        dy = dy.contiguous()
        (M, K), N = x.shape, w.shape[0]
        needs = ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, 64), triton.cdiv(K, 32))](dy, z, w, dx, M, N, K, **tiling())
        if needs[1] or needs[2]:
            dw = torch.empty_like(w)
            db = torch.empty(N, device=w.device, dtype=w.dtype)
            # one column of owners at least, so that db is stored where K is 0
            dw_db_kernel[(triton.cdiv(N, 64), max(1, triton.cdiv(K, 32)))](
                dy, z, x, dw, db, M, N, K, **tiling()
            )
        return dx, dw if needs[1] else None, db if needs[2] else None


def linear_gelu_autograd(x, w, b):
    return LinearGelu.apply(x, w, b)
