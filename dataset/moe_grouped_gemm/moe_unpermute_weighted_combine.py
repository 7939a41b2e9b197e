"""Combine of a mixture of experts: each token's result is the weighted sum of its k rows.

Forward    y_t = sum_k w_tk Ys_{pos_tk}   (Ys: the experts' rows, sorted by expert; pos is a permutation)
Backward   dYs_{pos_tk} = w_tk dy_t,   dw_tk = <dy_t, Ys_{pos_tk}>

Forward schedule: a program owns a token, gathers its k rows and adds them in registers.
Backward schedule: pos is a permutation, so each row of Ys belongs to one (token, k), and the token's program
may write it: the gather of the forward turns into a scatter without collisions, no atomics and no zero fill.
The same program has dy_t in registers for all k rows, and reads each row of Ys anyway for its dot with dy_t:
one read of dy and Ys, one write of dYs, for both gradients. Rows wider than a tile are walked in tiles; the
dot is carried over them.

op: moe_combine
schedule: swap_owner, row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def combine_kernel(ys_ptr, w_ptr, pos_ptr, y_ptr, K, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        row = tl.load(pos_ptr + token * K + k)
        w = tl.load(w_ptr + token * K + k).to(tl.float32)
        acc += w * tl.load(ys_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + d, acc.to(y_ptr.dtype.element_ty), mask=d < D)


@autodiff(inputs_require_grad=(0, 1))
def moe_combine(ys, w, pos):
    """ys: (T k, D), sorted by expert; w: (T, k); pos: int64 (T, k), a permutation of the rows of ys."""
    if w.shape != pos.shape or ys.shape[0] != pos.numel():
        raise ValueError(f"ys {tuple(ys.shape)}, w {tuple(w.shape)} and pos {tuple(pos.shape)} do not fit")
    ys, w, pos = ys.contiguous(), w.contiguous(), pos.contiguous()
    (T, K), D = pos.shape, ys.shape[1]
    y = torch.empty((T, D), device=ys.device, dtype=ys.dtype)
    combine_kernel[(T, triton.cdiv(D, BLOCK))](ys, w, pos, y, K, D, BLOCK=BLOCK)
    return y


def reference(ys, w, pos):
    return (w[:, :, None] * ys[pos]).sum(1)


SWEEP = [{"T": 8192, "K": 2, "D": 4096}, {"T": 4099, "K": 8, "D": 7168}]
SWEEP_CPU = [{"T": 27, "K": 3, "D": 52}, {"T": 6, "K": 8, "D": 1025}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, K, D = dims["T"], dims["K"], dims["D"]
    ys = torch.randn(T * K, D, device=device, dtype=dtype)
    w = torch.rand(T, K, device=device, dtype=dtype)
    return ys, w, torch.randperm(T * K, device=device).view(T, K)


# ---- backward ----


@triton.jit
def combine_backward_kernel(ys_ptr, w_ptr, pos_ptr, dy_ptr, dys_ptr, dw_ptr, K, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for k in range(K):
        row = tl.load(pos_ptr + token * K + k)
        w = tl.load(w_ptr + token * K + k).to(tl.float32)
        products = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            dy = tl.load(dy_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
            products += dy * tl.load(ys_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            tl.store(dys_ptr + row * D + d, (w * dy).to(dys_ptr.dtype.element_ty), mask=d < D)
        tl.store(dw_ptr + token * K + k, tl.sum(products).to(dw_ptr.dtype.element_ty))


class MoeCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ys, w, pos):
        ys, w, pos = ys.contiguous(), w.contiguous(), pos.contiguous()
        ctx.save_for_backward(ys, w, pos)
        return moe_combine(ys, w, pos)

    @staticmethod
    def backward(ctx, dy):
        ys, w, pos = ctx.saved_tensors
        dys, dw = torch.empty_like(ys), torch.empty_like(w)
        T, K = pos.shape
        combine_backward_kernel[(T,)](ys, w, pos, dy.contiguous(), dys, dw, K, ys.shape[1], BLOCK=BLOCK)
        return dys if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None


def moe_combine_autograd(ys, w, pos):
    return MoeCombine.apply(ys, w, pos)
