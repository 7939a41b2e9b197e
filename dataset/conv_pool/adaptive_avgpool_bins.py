"""Average pooling to a fixed size: any image to A x B bins, which overlap where the sizes do not divide.

Forward    bin a of A covers the rows i with floor(a H / A) <= i < ceil((a + 1) H / A), columns likewise;
           y[a, b] = mean of x over the bin
Backward   dx[i, j] = sum over the bins (a, b) that contain (i, j) of dy[a, b] / size(a, b)

Forward schedule: a program owns a flat tile of bins and walks the largest bin's rows and columns, masked.
Backward schedule: edges are whole-number formulas, and so is their inverse: floor(a H / A) <= i says
a < (i + 1) A / H, and ceil((a + 1) H / A) > i says a + 1 > i A / H, so the bins that contain row i are
a = floor(i A / H) .. ceil((i + 1) A / H) - 1: one or two when H > A, all that the row is spread over when
A > H. A pixel's owner finds its bins by two divisions an axis, gathers and stores once. Bin owners would need
atomics, as two of them share a row wherever H / A is not whole.

op: adaptive_avg_pool2d
schedule: gather_transpose
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def first_of(a, n, bins):
    return a * n // bins


@triton.jit
def size_of(a, n, bins):
    return ((a + 1) * n + bins - 1) // bins - a * n // bins


@triton.jit
def adaptive_pool_kernel(x_ptr, y_ptr, n_out, H, W, A, B, most_rows, most_cols, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = o // B % A, o % B
    i0, j0 = first_of(a, H, A), first_of(b, W, B)
    rows, cols = size_of(a, H, A), size_of(b, W, B)
    plane = x_ptr + o // (A * B) * H * W
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(most_rows):
        for j in range(most_cols):
            mask = (o < n_out) & (i < rows) & (j < cols)
            total += tl.load(plane + (i0 + i) * W + j0 + j, mask=mask, other=0.0).to(tl.float32)
    y = total / (rows * cols).to(tl.float32)
    tl.store(y_ptr + o, y.to(y_ptr.dtype.element_ty), mask=o < n_out)


def reach(n, bins):
    """No bin of `bins` over n pixels is longer, and no pixel of n is in more bins with the two swapped."""
    return min(n, (n - 1) // bins + 2)


@autodiff(inputs_require_grad=(0,))
def adaptive_avg_pool2d(x, A, B):
    """x: (N, C, H, W), neither H nor W zero; gives (N, C, A, B)."""
    x, (N, C, H, W) = x.contiguous(), x.shape
    if min(A, B, H, W) < 1:
        raise ValueError(f"no bins of {A} x {B} in an image of {H} x {W}")
    y = torch.empty((N, C, A, B), device=x.device, dtype=x.dtype)
    adaptive_pool_kernel[(triton.cdiv(y.numel(), BLOCK),)](
        x, y, y.numel(), H, W, A, B, reach(H, A), reach(W, B), BLOCK=BLOCK
    )
    return y


def reference(x, A, B):
    return torch.nn.functional.adaptive_avg_pool2d(x, (A, B))


SWEEP = [
    {"N": 32, "C": 512, "H": 56, "W": 56, "A": 7, "B": 7},
    {"N": 5, "C": 131, "H": 45, "W": 61, "A": 6, "B": 10},
]
SWEEP_CPU = [
    {"N": 2, "C": 4, "H": 10, "W": 7, "A": 3, "B": 4},
    {"N": 1, "C": 3, "H": 4, "W": 9, "A": 6, "B": 9},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return x, dims["A"], dims["B"]


# ---- backward ----


@triton.jit
def adaptive_pool_backward_kernel(
    dy_ptr, dx_ptr, n_in, H, W, A, B, most_a, most_b, BLOCK: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, j = p // W % H, p % W
    a0, b0 = first_of(i, A, H), first_of(j, B, W)
    count_a, count_b = size_of(i, A, H), size_of(j, B, W)
    plane = dy_ptr + p // (H * W) * A * B
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for step_a in range(most_a):
        a = a0 + step_a
        for step_b in range(most_b):
            b = b0 + step_b
            mask = (p < n_in) & (step_a < count_a) & (step_b < count_b)
            dy = tl.load(plane + a * B + b, mask=mask, other=0.0).to(tl.float32)
            dx += dy / (size_of(a, H, A) * size_of(b, W, B)).to(tl.float32)
    tl.store(dx_ptr + p, dx.to(dx_ptr.dtype.element_ty), mask=p < n_in)


class AdaptiveAvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A, B):
        ctx.x_shape = x.shape
        return adaptive_avg_pool2d(x, A, B)

    @staticmethod
    def backward(ctx, dy):
        (_, _, H, W), (A, B) = ctx.x_shape, dy.shape[2:]
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        adaptive_pool_backward_kernel[(triton.cdiv(dx.numel(), BLOCK),)](
            dy.contiguous(), dx, dx.numel(), H, W, A, B, reach(A, H), reach(B, W), BLOCK=BLOCK
        )
        return dx, None, None


def adaptive_avg_pool2d_autograd(x, A, B):
    return AdaptiveAvgPool2d.apply(x, A, B)
