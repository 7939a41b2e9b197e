"""A learned position embedding added to a batch of sequences.

Forward    y_bt = x_bt + p_t
Backward   dx = dy,   dp_t = sum over b of dy_bt

Forward schedule: a program owns (time step, channel tile) and walks the batch, so that p is read once.
Backward schedule: the same ownership: p_t has its own owner, which walks the batch, copies dy to dx on the
way (a gradient must not be the upstream's own memory) and stores the sum once. One read of dy serves both
gradients.

op: learned_position
schedule: swap_owner
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def position_add_kernel(x_ptr, p_ptr, y_ptr, B, T, C, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    p = tl.load(p_ptr + t * C + cols, mask=mask, other=0.0).to(tl.float32)
    for b in range(B):
        offs = (b * T + t) * C + cols
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) + p, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def position_add(x, p):
    """x: (B, T, C); p: (T, C)."""
    if x.shape[1:] != p.shape:
        raise ValueError(f"x {tuple(x.shape)} and p {tuple(p.shape)} do not fit")
    x, p = x.contiguous(), p.contiguous()
    B, T, C = x.shape
    y = torch.empty_like(x)
    position_add_kernel[(T, triton.cdiv(C, 128))](x, p, y, B, T, C, BLOCK=128)
    return y


def reference(x, p):
    return x + p


SWEEP = [{"B": 16, "T": 2048, "C": 2048}, {"B": 64, "T": 1024, "C": 768}, {"B": 5, "T": 2047, "C": 1001}]
SWEEP_CPU = [{"B": 5, "T": 13, "C": 30}, {"B": 2, "T": 3, "C": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["C"], device=device, dtype=dtype)
    return x, torch.randn(dims["T"], dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def position_add_backward_kernel(dy_ptr, dx_ptr, dp_ptr, B, T, C, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    dp = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        offs = (b * T + t) * C + cols
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, dy, mask=mask)
        dp += dy
    tl.store(dp_ptr + t * C + cols, dp, mask=mask)


class PositionAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        return position_add(x, p)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        B, T, C = dy.shape
        dx = torch.empty_like(dy)
        dp = torch.empty((T, C), device=dy.device, dtype=dy.dtype)
        position_add_backward_kernel[(T, triton.cdiv(C, 128))](dy, dx, dp, B, T, C, BLOCK=128)
        return dx if ctx.needs_input_grad[0] else None, dp if ctx.needs_input_grad[1] else None


def position_add_autograd(x, p):
    return PositionAdd.apply(x, p)
