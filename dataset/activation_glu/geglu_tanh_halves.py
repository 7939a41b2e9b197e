"""GeGLU with the tanh form of GELU, of two halves that stay where they are.

Forward    y = gelu(a) b,  gelu(a) = a (1 + tanh u) / 2 = a s,  u = c (a + k a^3),  s = sigmoid(2 u),
           c = sqrt(2 / pi),  k = 0.044715
Backward   gelu'(a) = s + a s (1 - s) 2 u',  u' = c (1 + 3 k a^2);  da = dy b gelu'(a),  db = dy gelu(a)

Forward schedule: rows by column tiles. a and b are usually two views of one projection, so each comes with
the stride of its rows; only its columns have to lie side by side, and nothing is copied.
Backward schedule: the same tiles and strides: the views are saved as they came, and one pass over a, b and dy
makes both gradients in two stores, each dense in a tensor of its own. (1 + tanh u) / 2 is a sigmoid, so one
exp rebuilds the value and the derivative; 1 - s never cancels, as 1 - tanh^2 would for a large u.

op: geglu
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def side_by_side(t):
    """`t` itself where its columns are next to each other, else a copy whose columns are."""
    return t if t.stride(1) == 1 else t.contiguous()


@triton.jit
def gate(a):
    """s and the slope of 2 u."""
    u = 0.7978845608028654 * (a + 0.044715 * a * a * a)
    return tl.sigmoid(2 * u), 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * a * a)


@triton.jit
def geglu_kernel(a_ptr, b_ptr, y_ptr, a_stride, b_stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    a = tl.load(a_ptr + row * a_stride + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + cols, mask=mask, other=0.0).to(tl.float32)
    s, _ = gate(a)
    tl.store(y_ptr + row * N + cols, (a * s * b).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def geglu(a, b):
    """a, b: (M, N), often the halves of one (M, 2 N)."""
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    a, b = side_by_side(a), side_by_side(b)
    M, N = a.shape
    y = torch.empty((M, N), device=a.device, dtype=a.dtype)
    geglu_kernel[(M, triton.cdiv(N, 512))](a, b, y, a.stride(0), b.stride(0), N, BLOCK=512)
    return y


def reference(a, b):
    return torch.nn.functional.gelu(a, approximate="tanh") * b


SWEEP = [{"M": 4096, "N": 10240}, {"M": 8191, "N": 2816}]
SWEEP_CPU = [{"M": 31, "N": 77}, {"M": 3, "N": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 2 * torch.randn(dims["M"], 2 * dims["N"], device=device, dtype=dtype)
    return x.chunk(2, dim=1)


# ---- backward ----


@triton.jit
def geglu_backward_kernel(
    a_ptr, b_ptr, dy_ptr, da_ptr, db_ptr, a_stride, b_stride, N, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    a = tl.load(a_ptr + row * a_stride + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    s, slope = gate(a)
    da = dy * b * (s + a * s * (1 - s) * slope)
    db = dy * a * s
    tl.store(da_ptr + row * N + cols, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + row * N + cols, db.to(db_ptr.dtype.element_ty), mask=mask)


class GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = side_by_side(a), side_by_side(b)
        ctx.save_for_backward(a, b)
        return geglu(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        M, N = a.shape
        da, db = (torch.empty((M, N), device=a.device, dtype=a.dtype) for _ in range(2))
        geglu_backward_kernel[(M, triton.cdiv(N, 512))](
            a, b, dy.contiguous(), da, db, a.stride(0), b.stride(0), N, BLOCK=512
        )
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def geglu_autograd(a, b):
    return GeGLU.apply(a, b)
