"""Softmax of scaled attention scores under a causal mask and a length for each batch.

Forward    y_j = exp(s x_j - m) / sum_k exp(s x_k - m) for j, k < n, and 0 from n on;
           query i of batch b sees n = min(i + 1, length_b) keys;  m = max of s x over them
Backward   dx_j = s y_j (dy_j - t),  t = sum_{k < n} dy_k y_k,  and 0 from n on

Forward schedule: a program owns a row. The mask leaves a prefix, so it is a loop bound: the online maximum
and sum walk n columns, not N, and the scores beyond are never read. One walk over all columns writes the
row; its loads end at n, its zeros go on. A row that sees no key is zero. Both walks round s x alike: m is
taken off the rounded product (a fused scale * x - m would not be 0 at the maximum), so that y sums to one.
Backward schedule: the same owner and the same bound. Nothing beyond n is read of y or dy, which over a
causal square is half of both, and an upstream that is undefined there does no harm. y itself is saved: from
it t and dx need neither the maximum nor the sum, and no exponential.

op: masked_softmax
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def masked_softmax_kernel(x_ptr, length_ptr, y_ptr, scale, H, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(row % N + 1, tl.load(length_ptr + row // (H * N)))
    lanes = tl.arange(0, BLOCK)
    m = -float("inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
        z = tl.where(cols < n, scale * x, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
        z = tl.where(cols < n, scale * x, -float("inf"))
        y = tl.where(cols < n, tl.exp(z - m) / total, 0.0)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def causal_softmax(x, lengths, scale):
    """x: (B, H, N, N), queries by keys; lengths: int64 (B), the keys that batch b has."""
    x = x.contiguous()
    _, H, N, keys = x.shape
    if keys != N:
        raise ValueError(f"{N} queries and {keys} keys: a causal mask needs a square")
    y = torch.empty_like(x)
    BLOCK = min(1024, triton.next_power_of_2(N))
    masked_softmax_kernel[(x.numel() // N,)](x, lengths, y, scale, H, N, BLOCK=BLOCK)
    return y


def reference(x, lengths, scale):
    i = torch.arange(x.shape[-1], device=x.device)
    seen = (i <= i[:, None]) & (i < lengths[:, None, None, None])
    z = (scale * x).masked_fill(~seen, torch.finfo(x.dtype).min)
    return torch.softmax(z, dim=-1) * seen


SWEEP = [{"B": 2, "H": 16, "N": 1024}, {"B": 1, "H": 12, "N": 2047}]
SWEEP_CPU = [{"B": 2, "H": 2, "N": 27}, {"B": 1, "H": 1, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, N = dims["B"], dims["N"]
    x = 2 * torch.randn(B, dims["H"], N, N, device=device, dtype=dtype)
    return x, torch.randint(N // 2, N + 1, (B,), device=device), 0.7


# ---- backward ----


@triton.jit
def masked_softmax_backward_kernel(
    y_ptr, dy_ptr, length_ptr, dx_ptr, scale, H, N, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(row % N + 1, tl.load(length_ptr + row // (H * N)))
    lanes = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + lanes
        y = tl.load(y_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
        products += y * tl.load(dy_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
    t = tl.sum(products, axis=0)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        y = tl.load(y_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + cols, mask=cols < n, other=0.0).to(tl.float32)
        dx = tl.where(cols < n, scale * y * (dy - t), 0.0)
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class CausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, scale):
        y = causal_softmax(x, lengths, scale)
        ctx.save_for_backward(y, lengths)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        y, lengths = ctx.saved_tensors
        _, H, N, _ = y.shape
        dx = torch.empty_like(y)
        BLOCK = min(1024, triton.next_power_of_2(N))
        masked_softmax_backward_kernel[(y.numel() // N,)](
            y, dy.contiguous(), lengths, dx, ctx.scale, H, N, BLOCK=BLOCK
        )
        return dx, None, None


def causal_softmax_autograd(x, lengths, scale):
    return CausalSoftmax.apply(x, lengths, scale)
