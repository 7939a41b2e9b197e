"""Mean over the tokens of each sequence of a packed batch: sentence embeddings without padding.

Forward    y_b = (1 / n_b) sum over the rows i of sequence b of x_i,  n_b its length;  0 for an empty sequence
Backward   dx_i = dy_b / n_b with b the sequence of i

Forward schedule: a program owns (sequence, column tile) and walks its rows, a tile of them at a time.
Backward schedule: nothing is summed, so the gradient is owned by what is stored: a program owns a tile of
rows and columns. Keeping the forward's grid would give a long sequence to one program, which would store all
its rows alone while others have none. The rows of a tile may belong to several sequences; each finds its own
by bisection of the offsets, as many steps as B has bits, and the offsets stay in cache. Among sequences that
begin at one place the last is taken: those before it are empty.

op: jagged_mean
schedule: gather_transpose
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 32, "BLOCK_D": 64}


@triton.jit
def mean_pool_kernel(x_ptr, offsets_ptr, y_ptr, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + b)
    end = tl.load(offsets_ptr + b + 1)
    total = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(begin, end, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        mask = (i[:, None] < end) & (d[None, :] < D)
        total += tl.load(x_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    n = tl.maximum(end - begin, 1).to(tl.float32)
    y = tl.sum(total, axis=0) / n
    tl.store(y_ptr + b * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


@autodiff(inputs_require_grad=(0,))
def jagged_mean_pool(x, offsets):
    """x: (rows, D); offsets: int64 (B + 1), from 0 to rows, not decreasing; gives (B, D)."""
    x, B, D = x.contiguous(), offsets.numel() - 1, x.shape[1]
    y = torch.empty((B, D), device=x.device, dtype=x.dtype)
    mean_pool_kernel[(B, triton.cdiv(D, TILE["BLOCK_D"]))](x, offsets.contiguous(), y, D, **TILE)
    return y


def reference(x, offsets):
    lengths = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=x.device), lengths)
    total = x.new_zeros(lengths.numel(), x.shape[1]).index_add(0, sequence, x)
    return total / lengths.clamp(min=1)[:, None]


SWEEP = [{"B": 512, "L": 512, "D": 768}, {"B": 4099, "L": 40, "D": 1000}]
SWEEP_CPU = [{"B": 4, "L": 22, "D": 40}, {"B": 9, "L": 70, "D": 71}]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.randint(0, dims["L"] + 1, (dims["B"],), device=device)
    lengths[::3] //= 8  # some short, some empty
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.randn(int(offsets[-1]), dims["D"], device=device, dtype=dtype), offsets


# ---- backward ----


@triton.jit
def mean_pool_backward_kernel(
    dy_ptr, offsets_ptr, dx_ptr, rows, B, D, BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.zeros([BLOCK_R], dtype=tl.int64)
    for bit in tl.static_range(BITS):  # the largest b < B with offsets[b] <= i
        later = b + (1 << (BITS - 1 - bit))
        begin = tl.load(offsets_ptr + later, mask=later < B, other=0)
        b = tl.where((later < B) & (begin <= i), later, b)
    begin = tl.load(offsets_ptr + b, mask=i < rows, other=0)
    end = tl.load(offsets_ptr + b + 1, mask=i < rows, other=1)
    mask = (i[:, None] < rows) & (d[None, :] < D)
    dy = tl.load(dy_ptr + b[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = dy / (end - begin).to(tl.float32)[:, None]
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class JaggedMeanPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets):
        offsets = offsets.contiguous()
        ctx.save_for_backward(offsets)
        ctx.rows = x.shape[0]
        return jagged_mean_pool(x, offsets)

    @staticmethod
    def backward(ctx, dy):
        (offsets,) = ctx.saved_tensors
        B, D = dy.shape
        dx = torch.empty((ctx.rows, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(ctx.rows, TILE["BLOCK_R"]), triton.cdiv(D, TILE["BLOCK_D"]))
        mean_pool_backward_kernel[grid](
            dy.contiguous(), offsets, dx, ctx.rows, B, D, BITS=(B - 1).bit_length(), **TILE
        )
        return dx, None


def jagged_mean_pool_autograd(x, offsets):
    return JaggedMeanPool.apply(x, offsets)
