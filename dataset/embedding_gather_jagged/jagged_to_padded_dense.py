"""Packed sequences laid out in a padded batch.

Forward    y_bt = x_{o_b + t} for t < o_{b + 1} - o_b, and the padding value from there on
Backward   dx_i = dy_bt with i = o_b + t;  the padding is a constant, so what comes back for it ends there.
           Positions from L on are cut off in the forward: their dx is 0

Forward schedule: a program owns (sequence, tile of positions, column tile), copies the rows that exist and
fills the rest.
Backward schedule: owned by what is stored, the packed rows: a program owns a tile of them and of columns, and
gathers each from its one place in the batch, (b, i - o_b); b comes from a search of i in the offsets, made
once for all columns. Nothing is summed, nothing is zeroed before, and dy is read only where it counts: a
batch padded to four times its tokens costs a quarter. No tile waits beyond a sequence's end, as it would
if the forward's grid were kept, and the longest sequence need not be known.

op: jagged_to_dense
schedule: gather_transpose
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 16, "BLOCK_D": 128}


@triton.jit
def pad_kernel(
    x_ptr, offsets_ptr, y_ptr, L, D, value, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + b)
    length = tl.load(offsets_ptr + b + 1) - begin
    there = (t[:, None] < length) & (t[:, None] < L) & (d[None, :] < D)
    x = tl.load(x_ptr + (begin + t[:, None]) * D + d[None, :], mask=there, other=0.0)
    y = tl.where(there, x.to(tl.float32), value)
    mask = (t[:, None] < L) & (d[None, :] < D)
    tl.store(y_ptr + (b * L + t[:, None]) * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def jagged_to_dense(x, offsets, L, value=0.0):
    """x: (rows, D); offsets: int64 (B + 1), from 0 to rows, not decreasing; gives (B, L, D)."""
    x = x.contiguous()
    B, D = offsets.numel() - 1, x.shape[1]
    y = torch.empty((B, L, D), device=x.device, dtype=x.dtype)
    grid = (B, triton.cdiv(L, TILE["BLOCK_T"]), triton.cdiv(D, TILE["BLOCK_D"]))
    pad_kernel[grid](x, offsets, y, L, D, value, **TILE)
    return y


def reference(x, offsets, L, value=0.0):
    rows = []
    for part in x.split(offsets.diff().tolist()):
        part = part[:L]
        rows.append(torch.nn.functional.pad(part, (0, 0, 0, L - part.shape[0]), value=value))
    return torch.stack(rows)


SWEEP = [{"B": 64, "L": 512, "D": 1024}, {"B": 33, "L": 1000, "D": 777}]
SWEEP_CPU = [{"B": 4, "L": 17, "D": 22}, {"B": 3, "L": 40, "D": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, L = dims["B"], dims["L"]
    lengths = torch.randint(0, L + 1, (B,), device=device)
    lengths[0] = L + 3  # longer than the batch is wide
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    x = torch.randn(int(offsets[-1]), dims["D"], device=device, dtype=dtype)
    return x, offsets, L, -1.0


# ---- backward ----


@triton.jit
def unpad_kernel(
    dy_ptr, offsets_ptr, sequence_ptr, dx_ptr, rows, L, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.load(sequence_ptr + i, mask=i < rows, other=0)
    t = i - tl.load(offsets_ptr + b)
    own = (i[:, None] < rows) & (d[None, :] < D)
    dy = tl.load(dy_ptr + (b * L + t)[:, None] * D + d[None, :], mask=own & (t[:, None] < L), other=0.0)
    tl.store(dx_ptr + i[:, None] * D + d[None, :], dy, mask=own)


class JaggedToDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, L, value):
        ctx.save_for_backward(offsets)
        ctx.rows = x.shape[0]
        return jagged_to_dense(x, offsets, L, value)

    @staticmethod
    def backward(ctx, dy):
        (offsets,) = ctx.saved_tensors
        rows, (_, L, D) = ctx.rows, dy.shape
        sequence = torch.searchsorted(offsets, torch.arange(rows, device=dy.device), right=True) - 1
        dx = torch.empty((rows, D), device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(rows, TILE["BLOCK_T"]), triton.cdiv(D, TILE["BLOCK_D"]))
        unpad_kernel[grid](dy.contiguous(), offsets, sequence, dx, rows, L, D, **TILE)
        return dx, None, None, None


def jagged_to_dense_autograd(x, offsets, L, value=0.0):
    return JaggedToDense.apply(x, offsets, L, value)
