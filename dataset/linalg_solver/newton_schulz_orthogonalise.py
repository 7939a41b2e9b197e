"""Newton-Schulz iteration: the nearest matrix with orthonormal rows, roughly, by products alone.

Forward    X_0 = r X,  r = (|X|_F^2 + eps)^(-1/2);
           A = X_k X_k^T,  B = b A + c A^2,  X_k+1 = a X_k + B X_k;   Y = X_K
Backward   with G the gradient of X_k+1, D = G X_k^T that of B. A, and so B, is symmetric:
           dA = b D + c (D A + A D),   dX_k = a G + B G + (dA + dA^T) X_k.
           At last the norm:  dX = r (G - X_0 <G, X_0>)

Forward schedule: the matrices are small and many, so a program owns one and iterates in registers; K tiles
and r are stored.
Backward schedule: the same owner walks the iterates in reverse. Of a step X_k is loaded, A and B are rebuilt
by two products, which is cheaper than storing them. The two places where X_k stands in A = X X^T share one
product: dA and its transpose are added first, and since A is symmetric D A + A D needs no transposed copies.
Seven products a step, and nothing leaves the registers but dX.

op: newton_schulz
schedule: adjoint_solve, reverse_scan, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_matrix(ptr, matrix, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    i, j = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    mask = (i[:, None] < R) & (j[None, :] < C)
    return tl.load(ptr + (matrix * R + i[:, None]) * C + j[None, :], mask=mask, other=0.0)


@triton.jit
def store_matrix(ptr, value, matrix, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    i, j = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    mask = (i[:, None] < R) & (j[None, :] < C)
    tl.store(ptr + (matrix * R + i[:, None]) * C + j[None, :], value, mask=mask)


@triton.jit
def gram_polynomial(X, b, c, PRECISION: tl.constexpr):
    A = tl.dot(X, tl.trans(X), input_precision=PRECISION)
    return A, b * A + c * tl.dot(A, A, input_precision=PRECISION)


@triton.jit
def iterate_kernel(
    x_ptr, saved_ptr, r_ptr, y_ptr, R, C, K, a, b, c, eps,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    X = load_matrix(x_ptr, matrix, R, C, BLOCK_R, BLOCK_C)
    r = tl.rsqrt(tl.sum(tl.sum(X * X, axis=1), axis=0) + eps)
    tl.store(r_ptr + matrix, r)
    X *= r
    for k in range(K):
        store_matrix(saved_ptr, X, matrix * K + k, R, C, BLOCK_R, BLOCK_C)
        _, B = gram_polynomial(X, b, c, PRECISION)
        X = a * X + tl.dot(B, X, input_precision=PRECISION)
    store_matrix(y_ptr, X, matrix, R, C, BLOCK_R, BLOCK_C)


COEFFICIENTS = (3.4445, -4.775, 2.0315)  # a, b, c: all singular values come near one in five steps


def tiling(x):
    R, C = x.shape[1:]
    if not 1 <= R <= 32 or not 1 <= C <= 64:
        raise ValueError(f"matrices of {R} x {C}: at most 32 x 64 fit in registers as products of float32")
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    blocks = {"BLOCK_R": max(16, triton.next_power_of_2(R)), "BLOCK_C": max(16, triton.next_power_of_2(C))}
    return {"PRECISION": PRECISION, **blocks, "num_warps": 8 if R * C > 512 else 4}


def newton_schulz_forward(x, steps, eps):
    if steps < 1:
        raise ValueError("need a step or more")
    (Bt, R, C), y = x.shape, torch.empty_like(x)
    saved = torch.empty((Bt, steps, R, C), device=x.device, dtype=torch.float32)
    r = torch.empty(Bt, device=x.device, dtype=torch.float32)
    iterate_kernel[(Bt,)](x, saved, r, y, R, C, steps, *COEFFICIENTS, eps, **tiling(x))
    return y, saved, r


@autodiff(inputs_require_grad=(0,))
def newton_schulz(x, steps=5, eps=1e-7):
    """x: (matrices, R, C), float32, R <= C for orthonormal rows."""
    return newton_schulz_forward(x.contiguous(), steps, eps)[0]


def reference(x, steps=5, eps=1e-7):
    a, b, c = COEFFICIENTS
    x = x * torch.rsqrt(x.pow(2).sum((1, 2), keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


SWEEP = [{"Bt": 8192, "m": 32, "n": 64}, {"Bt": 4001, "m": 19, "n": 50}]
SWEEP_CPU = [{"Bt": 3, "m": 16, "n": 24}, {"Bt": 2, "m": 9, "n": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["Bt"], dims["m"], dims["n"], device=device, dtype=dtype),), {"steps": 3}


# ---- backward ----


@triton.jit
def iterate_backward_kernel(
    saved_ptr, r_ptr, dy_ptr, dx_ptr, R, C, K, a, b, c,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    G = load_matrix(dy_ptr, matrix, R, C, BLOCK_R, BLOCK_C)
    for step in range(K):
        X = load_matrix(saved_ptr, matrix * K + K - 1 - step, R, C, BLOCK_R, BLOCK_C)
        A, B = gram_polynomial(X, b, c, PRECISION)
        D = tl.dot(G, tl.trans(X), input_precision=PRECISION)
        both = tl.dot(D, A, input_precision=PRECISION) + tl.dot(A, D, input_precision=PRECISION)
        dA = b * D + c * both
        G = a * G + tl.dot(B, G, input_precision=PRECISION)
        G += tl.dot(dA + tl.trans(dA), X, input_precision=PRECISION)
    X = load_matrix(saved_ptr, matrix * K, R, C, BLOCK_R, BLOCK_C)
    along = tl.sum(tl.sum(G * X, axis=1), axis=0)
    dx = tl.load(r_ptr + matrix) * (G - X * along)
    store_matrix(dx_ptr, dx, matrix, R, C, BLOCK_R, BLOCK_C)


class NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, steps, eps):
        x = x.contiguous()
        y, saved, r = newton_schulz_forward(x, steps, eps)
        ctx.save_for_backward(saved, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        saved, r = ctx.saved_tensors
        Bt, K, R, C = saved.shape
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        iterate_backward_kernel[(Bt,)](saved, r, dy, dx, R, C, K, *COEFFICIENTS, **tiling(dy))
        return dx, None, None


def newton_schulz_autograd(x, steps=5, eps=1e-7):
    return NewtonSchulz.apply(x, steps, eps)
