"""Mixture of experts: tokens sorted by expert on the host, one block of tokens and one expert a program,
weighted scatter."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 12, "E": 3, "D": 16, "F": 16}]


@triton.jit
def moe_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    order_ptr,
    expert_ptr,
    y_ptr,
    tokens,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert == -1:
        return
    slots = block * BM + tl.arange(0, BM)
    token = tl.load(order_ptr + slots)
    mask = token < tokens
    d = tl.arange(0, D)
    f = tl.arange(0, F)
    x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=mask[:, None], other=0.0)
    w = tl.load(w_ptr + expert * D * F + d[:, None] * F + f[None, :])
    y = tl.dot(x, w, input_precision="ieee") * tl.load(scale_ptr + token, mask=mask, other=0.0)[:, None]
    tl.store(y_ptr + token[:, None] * F + f[None, :], y, mask=mask[:, None])


@autodiff(inputs_require_grad=(0, 1, 2))
def moe(x, w, scale, choice):
    tokens, d = x.shape
    experts, _, f = w.shape
    bm = 16
    order = torch.full((experts * bm,), tokens, device=x.device, dtype=torch.int64)
    owner = torch.full((experts + 1,), -1, device=x.device, dtype=torch.int32)
    for e in range(experts):
        mine = (choice == e).nonzero().reshape(-1)
        order[e * bm : e * bm + mine.numel()] = mine
        owner[e] = e
    y = torch.zeros((tokens, f), device=x.device, dtype=x.dtype)
    moe_kernel[(experts + 1,)](x, w, scale, order, owner, y, tokens, D=d, F=f, BM=bm)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["T"], dims["D"], device=device, dtype=dtype)
    w = torch.randn(dims["E"], dims["D"], dims["F"], device=device, dtype=dtype)
    scale = torch.rand(dims["T"], device=device, dtype=dtype)
    return x, w, scale, torch.randint(0, dims["E"], (dims["T"],), device=device)


def reference(x, w, scale, choice):
    return torch.einsum("td,tdf->tf", x, w[choice]) * scale[:, None]
