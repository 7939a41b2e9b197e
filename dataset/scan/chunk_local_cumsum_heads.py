"""Running sums of gates within chunks of a fixed length, for all heads, as linear attention wants them.

Forward    y_t = sum of x_s over s <= t of t's chunk   (x: (B, T, H), chunks of C steps, the last ragged)
Backward   dx_s = sum of dy_t over t >= s of s's chunk

Forward schedule: a program owns (batch, chunk, tile of heads). Heads are the fast axis of memory, so a tile
of C rows by heads is loaded in whole lines. The sum runs down the rows as one product with the lower triangle
of ones, L x: a scan along an axis that is spread over threads costs log C exchanges, the product none.
Backward schedule: the same tiles with L^T, the upper triangle: the constant factor changes sides of the
diagonal, and nothing else does. Nothing is saved, every number is read and written once. The product is in
whole float32 ("ieee"): ones are exact in any precision, gates are not, and an error of tf32 in a sum of
logarithms would be an error of the same size in every weight made from it.

op: chunk_cumsum
schedule: same_tile_pointwise, reverse_scan
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def chunk_sums_kernel(x_ptr, y_ptr, T, H, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr):
    i = tl.arange(0, CHUNK)
    t = tl.program_id(1) * CHUNK + i
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (t[:, None] < T) & (h[None, :] < H)
    offs = (tl.program_id(0).to(tl.int64) * T + t[:, None]) * H + h[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if REVERSE:
        ones = tl.where(i[None, :] >= i[:, None], 1.0, 0.0)
    else:
        ones = tl.where(i[None, :] <= i[:, None], 1.0, 0.0)
    y = tl.dot(ones, x, input_precision="ieee")
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def chunk_sums(x, chunk, reverse):
    B, T, H = x.shape
    y = torch.empty_like(x)
    chunk_sums_kernel[(B, triton.cdiv(T, chunk), triton.cdiv(H, 16))](
        x, y, T, H, REVERSE=reverse, CHUNK=chunk, BLOCK_H=16
    )
    return y


@autodiff(inputs_require_grad=(0,))
def chunk_cumsum(x, chunk=64):
    """x: (B, T, H); chunk: 16, 32, 64 or 128."""
    if chunk not in (16, 32, 64, 128):
        raise ValueError(f"chunks of {chunk} are not 16, 32, 64 or 128")
    return chunk_sums(x.contiguous(), chunk, False)


def reference(x, chunk=64):
    return torch.cat([part.cumsum(1) for part in x.split(chunk, dim=1)], dim=1)


SWEEP = [{"B": 16, "T": 8192, "H": 64}, {"B": 3, "T": 4099, "H": 50}]
SWEEP_CPU = [{"B": 2, "T": 45, "H": 5}, {"B": 1, "T": 140, "H": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["H"], device=device, dtype=dtype)
    return torch.nn.functional.logsigmoid(3 + x), 32


# ---- backward ----


class ChunkCumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chunk):
        ctx.chunk = chunk
        return chunk_cumsum(x, chunk)

    @staticmethod
    def backward(ctx, dy):
        return chunk_sums(dy.contiguous(), ctx.chunk, True), None


def chunk_cumsum_autograd(x, chunk=64):
    return ChunkCumsum.apply(x, chunk)
