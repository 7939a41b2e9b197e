"""The forward is the stub's body, written out to keep the gate that it makes by torch."""

import torch
import triton
import triton.language as tl


@triton.jit
def gate_backward_kernel(gate_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    gate = tl.load(gate_ptr + row)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(dx_ptr + row * N + cols, dy * gate, mask=cols < N)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g):
        x = x.contiguous()
        gate = torch.sigmoid(g)
        y = torch.empty_like(x)
        gate_kernel[(x.shape[0],)](x, gate, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        ctx.save_for_backward(gate)
        return y

    @staticmethod
    def backward(ctx, dy):
        (gate,) = ctx.saved_tensors
        M, N = dy.shape
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        gate_backward_kernel[(M,)](gate, dy, dx, N, BLOCK=8)
        return dx, None


def gated_autograd(x, g):
    return Gated.apply(x, g)
