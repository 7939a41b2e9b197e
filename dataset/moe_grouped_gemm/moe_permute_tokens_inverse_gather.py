"""Mixture of experts: tokens copied to the slots of their experts.

Forward    Xs[pos_tk] = x_t for the k-th choice of token t; pos is a permutation of the T K slots
Backward   dx_t = sum_k dXs[pos_tk]

Forward schedule: a program owns a slot and gathers the row of its token.
Backward schedule: seen from the slots this is a scatter with K collisions a token. Seen from the tokens it
is a gather: the owner of token t reads its K slots through pos, the inverse map, which the router has
anyway, sums in registers and stores once. No atomics, no zero fill, a fixed order of summation.

op: moe_permute
schedule: segment_gather
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def permute_kernel(x_ptr, token_ptr, xs_ptr, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.load(token_ptr + slot) * D + cols, mask=cols < D, other=0.0)
    tl.store(xs_ptr + slot * D + cols, x, mask=cols < D)


@autodiff(inputs_require_grad=(0,))
def moe_permute(x, token, pos):
    """x: (T, D); token: int64 (T K), the token in each slot; pos: int64 (T, K), the slot of each choice."""
    x = x.contiguous()
    D = x.shape[1]
    xs = torch.empty((token.numel(), D), device=x.device, dtype=x.dtype)
    permute_kernel[(token.numel(), triton.cdiv(D, 128))](x, token.contiguous(), xs, D, BLOCK=128)
    return xs


def reference(x, token, pos):
    return x[token]


SWEEP = [
    {"T": 8192, "K": 2, "D": 4096},
    {"T": 4096, "K": 8, "D": 2048},
    {"T": 4099, "K": 6, "D": 1001},
]
SWEEP_CPU = [{"T": 29, "K": 3, "D": 40}, {"T": 8, "K": 1, "D": 200}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, K = dims["T"], dims["K"]
    x = torch.randn(T, dims["D"], device=device, dtype=dtype)
    order = torch.randperm(T * K, device=device)  # slot -> flat choice
    return x, order // K, torch.argsort(order).view(T, K)


# ---- backward ----


@triton.jit
def permute_backward_kernel(dxs_ptr, pos_ptr, dx_ptr, K, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        slot = tl.load(pos_ptr + token * K + k)
        acc += tl.load(dxs_ptr + slot * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(dx_ptr + token * D + cols, acc, mask=cols < D)


class MoePermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, pos):
        ctx.save_for_backward(pos.contiguous())
        return moe_permute(x, token, pos)

    @staticmethod
    def backward(ctx, dxs):
        (pos,) = ctx.saved_tensors
        dxs = dxs.contiguous()
        (T, K), D = pos.shape, dxs.shape[1]
        dx = torch.empty((T, D), device=dxs.device, dtype=dxs.dtype)
        permute_backward_kernel[(T, triton.cdiv(D, 128))](dxs, pos, dx, K, D, BLOCK=128)
        return dx, None, None


def moe_permute_autograd(x, token, pos):
    return MoePermute.apply(x, token, pos)
