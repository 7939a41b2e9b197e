"""Lets autograd make zeros of an upstream that is None; setup_context; heuristics."""

import torch
import triton
import triton.language as tl


@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def several_backward_kernel(
    x_ptr, dsquare_ptr, dcube_ptr, dx_ptr, N, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < (tl.cdiv(N, BLOCK) * BLOCK if EVEN else N)
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    dsquare = tl.load(dsquare_ptr + i, mask=mask, other=0.0)
    dcube = tl.load(dcube_ptr + i, mask=mask, other=0.0)
    tl.store(dx_ptr + i, x * (2 * dsquare + 3 * x * dcube), mask=mask)


class Several(torch.autograd.Function):
    @staticmethod
    def forward(x, flag):
        square, _, _, (_, cube), sign = several(x, flag)
        return square, cube, sign

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, dsquare, dcube, dsign):
        (x,) = ctx.saved_tensors
        dx, n = torch.empty_like(x), x.numel()
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
        several_backward_kernel[grid](x, dsquare.contiguous(), dcube.contiguous(), dx, n, BLOCK=8)
        return dx, None


def several_autograd(x, flag=True):
    square, cube, sign = Several.apply(x, flag)
    return square, None, x.numel(), (x, cube), sign
