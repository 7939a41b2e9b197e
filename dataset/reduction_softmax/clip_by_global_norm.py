"""A tensor scaled down to a largest norm; shorter ones pass unchanged.

Forward    n = |x|,   y = (c / n) x if n > c, and y = x otherwise
Backward   if n > c:   d(c / n) = -(c / n^3) <x, dx>, so with s = c / n:   dx = s dy - (s / n^2) <dy, x> x
           otherwise:  dx = dy

Forward schedule: a norm of everything needs all programs, and every number of y needs the norm. One kernel
stores partial sums of squares, some hundred in number whatever the size of x; in the second every program
adds all of those, out of cache, and scales its own tile: no third launch, and no number that the host would
read.
Backward schedule: the same two kernels in other words. <dy, x> is made from partial sums by the kernel that
makes <x, x>; then each program adds the parts, takes the saved n^2, and corrects its tile. Whether clipping
happened is known on the device alone, so it is a selection in the kernel; an unclipped gradient costs a pass
that a host's branch could have spared, and saves the wait for the host.

op: global_norm_clip
schedule: partials_then_reduce, same_tile_pointwise
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PARTS = tl.constexpr(256)
BLOCK = 1024


@triton.jit
def partial_dot_kernel(a_ptr, b_ptr, parts_ptr, size, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(pid * BLOCK, size, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + i, mask=i < size, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + i, mask=i < size, other=0.0).to(tl.float32)
        total += a * b
    tl.store(parts_ptr + pid, tl.sum(total, axis=0))


@triton.jit
def sum_parts(parts_ptr):
    return tl.sum(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0)


@triton.jit
def scale_kernel(x_ptr, parts_ptr, y_ptr, square_ptr, size, c, BLOCK: tl.constexpr):
    square = sum_parts(parts_ptr)
    clipped = square > c * c
    s = tl.where(clipped, c * tl.rsqrt(tl.where(clipped, square, 1.0)), 1.0)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, (x * s).to(y_ptr.dtype.element_ty), mask=i < size)
    if tl.program_id(0) == 0:
        tl.store(square_ptr, square)


def partial_dots(a, b):
    parts = torch.empty(PARTS.value, device=a.device, dtype=torch.float32)
    partial_dot_kernel[(PARTS.value,)](a, b, parts, a.numel(), BLOCK=BLOCK)
    return parts


def clip_forward(x, c):
    if c <= 0:
        raise ValueError(f"nothing has a norm of at most {c}")
    y, square = torch.empty_like(x), torch.empty((), device=x.device, dtype=torch.float32)
    scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, partial_dots(x, x), y, square, x.numel(), c, BLOCK=BLOCK
    )
    return y, square


@autodiff(inputs_require_grad=(0,))
def clip_by_global_norm(x, c):
    """x: any shape; c: the largest norm, above 0."""
    return clip_forward(x.contiguous(), c)[0]


def reference(x, c):
    square = x.pow(2).sum()
    clipped = square > c * c
    return x * torch.where(clipped, c * torch.rsqrt(torch.where(clipped, square, 1.0)), 1.0)


SWEEP = [{"N": 30000000}, {"N": 1000003}]
SWEEP_CPU = [{"N": 1500}, {"N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["N"], device=device, dtype=dtype), 10.0  # the norm is about the root of N


# ---- backward ----


@triton.jit
def clip_backward_kernel(x_ptr, dy_ptr, parts_ptr, square_ptr, dx_ptr, size, c, BLOCK: tl.constexpr):
    square = tl.load(square_ptr)
    clipped = square > c * c
    square = tl.where(clipped, square, 1.0)
    s = tl.where(clipped, c * tl.rsqrt(square), 1.0)
    slope = tl.where(clipped, s / square * sum_parts(parts_ptr), 0.0)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(dx_ptr + i, (s * dy - slope * x).to(dx_ptr.dtype.element_ty), mask=i < size)


class ClipByGlobalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c):
        x = x.contiguous()
        y, square = clip_forward(x, c)
        ctx.save_for_backward(x, square)
        ctx.c = c
        return y

    @staticmethod
    def backward(ctx, dy):
        x, square = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        clip_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, dy, partial_dots(dy, x), square, dx, x.numel(), ctx.c, BLOCK=BLOCK
        )
        return dx, None


def clip_by_global_norm_autograd(x, c):
    return ClipByGlobalNorm.apply(x, c)
