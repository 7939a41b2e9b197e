"""Snake: an activation with a period that is learned for each channel (vocoders such as BigVGAN).

Forward    y = x + sin^2(a_c x) / a_c for channel c at each time
Backward   (sin^2)' = sin 2t:  dx = dy (1 + sin(2 a x));
           da_c = sum over batch and time of dy (x sin(2 a x) - sin^2(a x) / a) / a

Forward schedule: a grid of (plane, time tile), a plane being a channel of a sample.
Backward schedule: dx is pointwise, and the sum of da needs just what dx has computed. A channel's owner would
walk all samples and be one of a few hundred programs, at the fine end of a vocoder of a few dozen, with long
waves each; so a program owns (plane, time chunk), walks its tiles, and leaves one number. The second kernel,
a program a channel, adds that channel's numbers over samples and chunks. sin 2t is 2 sin t cos t, with the
sine that sin^2 wants in any case.

op: snake
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def snake_kernel(x_ptr, a_ptr, y_ptr, C, T, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + plane % C).to(tl.float32)
    offs = plane.to(tl.int64) * T + t
    x = tl.load(x_ptr + offs, mask=t < T, other=0.0).to(tl.float32)
    sine = tl.sin(a * x)
    tl.store(y_ptr + offs, (x + sine * sine / a).to(y_ptr.dtype.element_ty), mask=t < T)


@autodiff(inputs_require_grad=(0, 1))
def snake(x, a):
    """x: (B, C, T); a: (C), positive."""
    B, C, T = x.shape
    if a.shape != (C,):
        raise ValueError("a has a number for each channel of x")
    y = torch.empty((B, C, T), device=x.device, dtype=x.dtype)
    snake_kernel[(B * C, triton.cdiv(T, 1024))](x.contiguous(), a.contiguous(), y, C, T, BLOCK=1024)
    return y


def reference(x, a):
    a = a[:, None]
    return x + torch.sin(a * x) ** 2 / a


SWEEP = [{"B": 16, "C": 48, "T": 65536}, {"B": 5, "C": 193, "T": 16001}]
SWEEP_CPU = [{"B": 3, "C": 5, "T": 70}, {"B": 1, "C": 2, "T": 4200}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["T"], device=device, dtype=dtype)
    return x, (0.5 + torch.rand(dims["C"], device=device)).to(dtype)


# ---- backward ----

CHUNK = 4096  # times of a program


@triton.jit
def snake_backward_kernel(
    x_ptr, a_ptr, dy_ptr, dx_ptr, part_ptr, C, T, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    plane = tl.program_id(0)
    a = tl.load(a_ptr + plane % C).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        t = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        offs = plane.to(tl.int64) * T + t
        x = tl.load(x_ptr + offs, mask=t < T, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=t < T, other=0.0).to(tl.float32)
        sine = tl.sin(a * x)
        sine_twice = 2 * sine * tl.cos(a * x)
        tl.store(dx_ptr + offs, (dy * (1 + sine_twice)).to(dx_ptr.dtype.element_ty), mask=t < T)
        total += dy * (x * sine_twice - sine * sine / a)
    slot = plane * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_ptr + slot, tl.sum(total, axis=0) / a)


@triton.jit
def frequency_kernel(part_ptr, da_ptr, B, C, chunks, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)  # (sample, chunk)
        slot = (i // chunks * C + c) * chunks + i % chunks
        total += tl.load(part_ptr + slot, mask=i < B * chunks, other=0.0)
    tl.store(da_ptr + c, tl.sum(total, axis=0).to(da_ptr.dtype.element_ty))


class Snake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        x, a = x.contiguous(), a.contiguous()
        ctx.save_for_backward(x, a)
        return snake(x, a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        B, C, T = x.shape
        dx, da = torch.empty_like(x), None
        chunks = triton.cdiv(T, CHUNK)
        part = torch.empty((B, C, chunks), device=x.device, dtype=torch.float32)
        snake_backward_kernel[(B * C, chunks)](x, a, dy.contiguous(), dx, part, C, T, CHUNK=CHUNK, BLOCK=1024)
        if ctx.needs_input_grad[1]:
            da = torch.empty_like(a)
            frequency_kernel[(C,)](part, da, B, C, chunks, BLOCK=128)
        return dx if ctx.needs_input_grad[0] else None, da


def snake_autograd(x, a):
    return Snake.apply(x, a)
