"""Embedding with a small table (bytes, residues, atom types), whose gradient is a product with one-hot rows.

Forward    y_t = W[idx_t]
Backward   dW = E^T dY with E[t, v] = [idx_t = v]

Forward schedule: a program owns (tile of tokens, tile of columns) and gathers.
Backward schedule: with a few hundred rows and many thousand tokens, each row is hit hundreds of times:
atomics would queue up on the same addresses, and a sort of the tokens takes longer than the sum. So the
table's owners walk all tokens: a program has a tile of rows and columns, compares a tile of indices with its
rows, which is E^T in registers, and feeds it to the tensor cores beside the tile of dY. Comparing costs
nothing, dY is read once for each tile of rows (from cache after the first), the order of the sum is fixed,
and a row without tokens gets its zero. A one-hot times a number is exact in every dtype; the sum is fp32. For
large tables this would be V / 64 reads of dY: take a sort there.

op: embedding
schedule: swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_N": 32, "BLOCK_D": 64}


def dot_precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def lookup_kernel(w_ptr, idx_ptr, y_ptr, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    v = tl.load(idx_ptr + t, mask=t < N, other=0)
    mask = (t[:, None] < N) & (d[None, :] < D)
    w = tl.load(w_ptr + v[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], w, mask=mask)


@autodiff(inputs_require_grad=(0,))
def small_embedding(w, idx):
    """w: (V, D); idx: int64, any shape, from 0 to V - 1."""
    w, idx, D = w.contiguous(), idx.contiguous(), w.shape[1]
    y = torch.empty((*idx.shape, D), device=w.device, dtype=w.dtype)
    grid = (triton.cdiv(idx.numel(), TILE["BLOCK_N"]), triton.cdiv(D, TILE["BLOCK_D"]))
    lookup_kernel[grid](w, idx, y, idx.numel(), D, **TILE)
    return y


def reference(w, idx):
    return w[idx]


SWEEP = [{"B": 16, "T": 4096, "V": 259, "D": 512}, {"B": 7, "T": 3001, "V": 33, "D": 320}]
SWEEP_CPU = [{"B": 2, "T": 33, "V": 45, "D": 32}, {"B": 1, "T": 130, "V": 20, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    return w, torch.randint(0, dims["V"], (dims["B"], dims["T"]), device=device)


# ---- backward ----


@triton.jit
def onehot_kernel(
    idx_ptr, dy_ptr, dw_ptr, N, V, D,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_V, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N).to(tl.int64)
        idx = tl.load(idx_ptr + t, mask=t < N, other=-1)
        mask = (t[:, None] < N) & (d[None, :] < D)
        dy = tl.load(dy_ptr + t[:, None] * D + d[None, :], mask=mask, other=0.0)
        onehot = (v[:, None] == idx[None, :]).to(dy.dtype)
        dw = tl.dot(onehot, dy, dw, input_precision=PRECISION)
    mask = (v[:, None] < V) & (d[None, :] < D)
    offs = v[:, None].to(tl.int64) * D + d[None, :]
    tl.store(dw_ptr + offs, dw.to(dw_ptr.dtype.element_ty), mask=mask)


class SmallEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, idx):
        idx = idx.contiguous()
        ctx.save_for_backward(idx)
        ctx.w_shape = w.shape
        return small_embedding(w, idx)

    @staticmethod
    def backward(ctx, dy):
        (idx,) = ctx.saved_tensors
        V, D = ctx.w_shape
        dw = torch.empty((V, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(V, 64), triton.cdiv(D, TILE["BLOCK_D"]))
        onehot_kernel[grid](
            idx, dy.contiguous(), dw, idx.numel(), V, D, PRECISION=dot_precision(), BLOCK_V=64, **TILE
        )
        return dw, None


def small_embedding_autograd(w, idx):
    return SmallEmbedding.apply(w, idx)
