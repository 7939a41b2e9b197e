"""Softmax of attention scores with a learned temperature for each head.

Forward    z = x / T_h for the rows of head h,  y_j = exp(z_j) / sum_k exp(z_k)
Backward   dz_j = y_j (dy_j - t),  t = sum_k dy_k y_k;  dx = dz / T_h;
           dT_h = -(1 / T_h) sum over the rows of h of u,  u = sum_j dz_j z_j = sum_j dz_j log y_j, since
           log y_j = z_j - lse and the dz of a row sum to zero

Forward schedule: a program owns a row, whole in one tile.
Backward schedule: the same owner. It has dz in registers to write dx, and u is one more sum over them. It
seems to want x, which is as large as y and would have to be saved and read beside it; but the lse that
log y lacks falls out of the sum, so y alone serves both gradients. Where y has vanished dz has too, and the
logarithm is not taken. A row leaves u in a slot; a program a head adds its slots and stores dT.

op: softmax_temperature
schedule: row_reduce_correct, partials_then_reduce
difficulty: 2
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softmax_kernel(x_ptr, T_ptr, y_ptr, heads, rows, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    T = tl.load(T_ptr + row // rows % heads).to(tl.float32)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    z = tl.where(cols < N, x / T, -float("inf"))
    e = tl.exp(z - tl.max(z, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def temperature_softmax(x, T):
    """x: (B, heads, rows, N); T: (heads), not zero."""
    x = x.contiguous()
    B, heads, rows, N = x.shape
    if N > 32768:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(N)
    softmax_kernel[(B * heads * rows,)](x, T.contiguous(), y, heads, rows, N, BLOCK=BLOCK)
    return y


def reference(x, T):
    return torch.softmax(x / T[:, None, None], dim=-1)


SWEEP = [{"B": 2, "heads": 12, "R": 1024, "N": 1024}, {"B": 3, "heads": 7, "R": 531, "N": 2050}]
SWEEP_CPU = [{"B": 2, "heads": 3, "R": 5, "N": 40}, {"B": 1, "heads": 2, "R": 19, "N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["heads"], dims["R"], dims["N"], device=device, dtype=dtype)
    return x, 0.5 + torch.rand(dims["heads"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def softmax_backward_kernel(y_ptr, T_ptr, dy_ptr, dx_ptr, u_ptr, heads, rows, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    T = tl.load(T_ptr + row // rows % heads).to(tl.float32)
    y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dz = y * (dy - tl.sum(dy * y, axis=0))
    tl.store(dx_ptr + row * N + cols, (dz / T).to(dx_ptr.dtype.element_ty), mask=cols < N)
    tl.store(u_ptr + row, tl.sum(dz * tl.log(tl.where(y > 0, y, 1.0)), axis=0))


@triton.jit
def temperature_kernel(u_ptr, T_ptr, dT_ptr, B, heads, rows, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        for start in range(0, rows, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(u_ptr + (b * heads + head) * rows + i, mask=i < rows, other=0.0)
    dT = -tl.sum(total, axis=0) / tl.load(T_ptr + head).to(tl.float32)
    tl.store(dT_ptr + head, dT.to(dT_ptr.dtype.element_ty))


class TemperatureSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, T):
        T = T.contiguous()
        y = temperature_softmax(x, T)
        ctx.save_for_backward(y, T)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, T = ctx.saved_tensors
        B, heads, rows, N = y.shape
        dx, dT = torch.empty_like(y), torch.empty_like(T)
        u = torch.empty((B, heads, rows), device=y.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(N)
        softmax_backward_kernel[(u.numel(),)](y, T, dy.contiguous(), dx, u, heads, rows, N, BLOCK=BLOCK)
        needs = ctx.needs_input_grad
        if needs[1]:
            temperature_kernel[(heads,)](u, T, dT, B, heads, rows, BLOCK=512)
        return dx if needs[0] else None, dT if needs[1] else None


def temperature_softmax_autograd(x, T):
    return TemperatureSoftmax.apply(x, T)
