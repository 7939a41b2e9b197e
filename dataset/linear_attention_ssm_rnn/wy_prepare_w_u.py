"""The WY form of a chunk of delta-rule updates: the products that let a whole chunk act on the state at once.

Forward    in each chunk of C rows, with A_ij = b_i <k_i, k_j> for j < i and 0 elsewhere:
           T = (I + A)^{-1},   W = T diag(b) K,   U = T diag(b) V
Backward   W and U solve (I + A) W = diag(b) K and (I + A) U = diag(b) V. So with X = T^T dW and Y = T^T dU,
           the gradients of the right sides:   dA = -(X W^T + Y U^T) for j < i,
           dV = diag(b) Y,   dK = diag(b) (X + dA K) + dA^T diag(b) K,
           db_i = <X_i, k_i> + <Y_i, v_i> + sum_j dA_ij <k_i, k_j>

Forward schedule: a program owns a chunk. I + A is unit lower triangular, so its inverse is made row by row in
registers, each row from those above it; then tiles of columns of K and V pass through one dot each. T is
kept, C numbers a token.
Backward schedule: the same owner, every output being its own. The identity d(T) = -T d(A) T would give dA =
-T^T dT T^T with dT = dW (b K)^T + dU (b V)^T: two products of C x C tiles more, and a tile the more to hold.
Taking the solve as the operation, dA comes straight from X and Y, which dK and dV need as well, and from the
outputs W and U. A first pass over column tiles sums dA and K K^T; only then is dK known, so a second pass
makes X again, a dot of C x C by one tile, in place of holding all its columns: DK and DV may be any.

op: wy_representation
schedule: adjoint_solve
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 32


def tiling(k):
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "CHUNK": CHUNK, "BLOCK": 32 if k.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def wy_kernel(
    k_ptr, v_ptr, beta_ptr, w_ptr, u_ptr, inverse_ptr, T, DK, DV,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    rows = tl.program_id(0) * CHUNK + i
    beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
    keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start in range(0, DK, BLOCK):
        k = load_tile(k_ptr + head * T * DK, rows, start + tl.arange(0, BLOCK), T, DK)
        keys = tl.dot(k, tl.trans(k), keys, input_precision=PRECISION)
    A = tl.where(i[None, :] < i[:, None], keys * beta[:, None], 0.0)
    inverse = tl.where(i[None, :] == i[:, None], 1.0, 0.0)
    for row in range(1, CHUNK):  # row of T = e_row - sum_j A_row,j T_j
        a = tl.sum(tl.where(i[:, None] == row, A, 0.0), axis=0)
        above = tl.sum(a[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == row, above[None, :], 0.0)
    place = (head * tl.num_programs(0) + tl.program_id(0)) * CHUNK * CHUNK
    store_tile(inverse_ptr + place, inverse, i, i, CHUNK, CHUNK)
    scaled = (inverse * beta[None, :]).to(k_ptr.dtype.element_ty)
    for start in range(0, DK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * T * DK, rows, cols, T, DK)
        store_tile(w_ptr + head * T * DK, tl.dot(scaled, k, input_precision=PRECISION), rows, cols, T, DK)
    for start in range(0, DV, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = load_tile(v_ptr + head * T * DV, rows, cols, T, DV)
        store_tile(u_ptr + head * T * DV, tl.dot(scaled, v, input_precision=PRECISION), rows, cols, T, DV)


def wy_forward(k, v, beta):
    (B, H, T, DK), DV = k.shape, v.shape[3]
    if v.shape[:3] != k.shape[:3] or beta.shape != k.shape[:3]:
        raise ValueError("k, v and beta must agree in batch, heads and time")
    chunks = triton.cdiv(T, CHUNK)
    w, u = torch.empty_like(k), torch.empty_like(v)
    inverse = torch.empty((B, H, chunks, CHUNK, CHUNK), device=k.device, dtype=torch.float32)
    wy_kernel[(chunks, B * H)](k, v, beta, w, u, inverse, T, DK, DV, **tiling(k))
    return w, u, inverse


@autodiff(inputs_require_grad=(0, 1, 2))
def wy_prepare(k, v, beta):
    """k: (B, H, T, DK), of about unit length; v: (B, H, T, DV); beta: (B, H, T). Gives w and u."""
    return wy_forward(k.contiguous(), v.contiguous(), beta.contiguous())[:2]


def reference(k, v, beta):
    dtype, w, u = torch.promote_types(k.dtype, torch.float32), [], []  # what solvers take
    for start in range(0, k.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        k_c, v_c, b = k[:, :, part].to(dtype), v[:, :, part].to(dtype), beta[:, :, part, None].to(dtype)
        system = (b * k_c @ k_c.transpose(-1, -2)).tril(-1)
        system = system + torch.eye(k_c.shape[2], device=k.device, dtype=dtype)
        w.append(torch.linalg.solve_triangular(system, b * k_c, upper=False, unitriangular=True))
        u.append(torch.linalg.solve_triangular(system, b * v_c, upper=False, unitriangular=True))
    return torch.cat(w, dim=2).to(k.dtype), torch.cat(u, dim=2).to(v.dtype)


SWEEP = [
    {"B": 2, "H": 16, "T": 4096, "DK": 128, "DV": 128},
    {"B": 1, "H": 8, "T": 2039, "DK": 64, "DV": 200},
]
SWEEP_CPU = [{"B": 1, "H": 1, "T": 40, "DK": 16, "DV": 36}, {"B": 1, "H": 2, "T": 9, "DK": 40, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, DK, DV = (dims[name] for name in ("B", "H", "T", "DK", "DV"))
    k = torch.randn(B, H, T, DK, device=device, dtype=dtype) / max(1, DK) ** 0.5
    v = torch.randn(B, H, T, DV, device=device, dtype=dtype)
    return k, v, torch.rand(B, H, T, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def wy_backward_kernel(
    k_ptr, v_ptr, beta_ptr, w_ptr, u_ptr, inverse_ptr, dw_ptr, du_ptr, dk_ptr, dv_ptr, dbeta_ptr, T, DK, DV,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    rows = tl.program_id(0) * CHUNK + i
    beta = tl.load(beta_ptr + head * T + rows, mask=rows < T, other=0.0).to(tl.float32)
    place = (head * tl.num_programs(0) + tl.program_id(0)) * CHUNK * CHUNK
    inverse = load_tile(inverse_ptr + place, i, i, CHUNK, CHUNK)
    inverse = tl.trans(inverse.to(k_ptr.dtype.element_ty))
    keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # its negative, so far
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    for start in range(0, DV, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        du = load_tile(du_ptr + head * T * DV, rows, cols, T, DV)
        y = tl.dot(inverse, du, input_precision=PRECISION)
        dbeta += tl.sum(y * load_tile(v_ptr + head * T * DV, rows, cols, T, DV).to(tl.float32), axis=1)
        store_tile(dv_ptr + head * T * DV, y * beta[:, None], rows, cols, T, DV)
        u = load_tile(u_ptr + head * T * DV, rows, cols, T, DV)
        dA = tl.dot(y.to(u.dtype), tl.trans(u), dA, input_precision=PRECISION)
    for start in range(0, DK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * T * DK, rows, cols, T, DK)
        w = load_tile(w_ptr + head * T * DK, rows, cols, T, DK)
        dw = load_tile(dw_ptr + head * T * DK, rows, cols, T, DK)
        x = tl.dot(inverse, dw, input_precision=PRECISION)
        dbeta += tl.sum(x * k.to(tl.float32), axis=1)
        dA = tl.dot(x.to(w.dtype), tl.trans(w), dA, input_precision=PRECISION)
        keys = tl.dot(k, tl.trans(k), keys, input_precision=PRECISION)
    dA = tl.where(i[None, :] < i[:, None], -dA, 0.0)
    dbeta += tl.sum(dA * keys, axis=1)
    tl.store(dbeta_ptr + head * T + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < T)
    dA *= beta[:, None]  # the gradient of <k_i, k_j>
    both = (dA + tl.trans(dA)).to(k_ptr.dtype.element_ty)
    for start in range(0, DK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * T * DK, rows, cols, T, DK)
        dw = load_tile(dw_ptr + head * T * DK, rows, cols, T, DK)
        dk = tl.dot(inverse, dw, input_precision=PRECISION) * beta[:, None]
        dk = tl.dot(both, k, dk, input_precision=PRECISION)
        store_tile(dk_ptr + head * T * DK, dk, rows, cols, T, DK)


class WyPrepare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, beta):
        k, v, beta = k.contiguous(), v.contiguous(), beta.contiguous()
        w, u, inverse = wy_forward(k, v, beta)
        ctx.save_for_backward(k, v, beta, w, u, inverse)
        return w, u

    @staticmethod
    def backward(ctx, dw, du):
        k, v, beta, w, u, inverse = ctx.saved_tensors
        (B, H, T, DK), DV = k.shape, v.shape[3]
        grads = tuple(torch.empty_like(tensor) for tensor in (k, v, beta))
        wy_backward_kernel[(inverse.shape[2], B * H)](
            k, v, beta, w, u, inverse, dw.contiguous(), du.contiguous(), *grads, T, DK, DV, **tiling(k)
        )
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def wy_prepare_autograd(k, v, beta):
    return WyPrepare.apply(k, v, beta)
