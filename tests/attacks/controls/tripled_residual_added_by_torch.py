"""The residual is added by torch, as the stub does it."""

import torch


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return triple(x)

    @staticmethod
    def backward(ctx, dy):
        return triple(dy.contiguous())


def tripled_residual_autograd(x, r):
    x = x.contiguous()
    return r + Triple.apply(x)
