"""A padded batch packed to rows, with a bias of each sequence added: prompts, speakers, conditions.

Forward    y_i = x_{b, i - o_b} + c_b for the rows i of sequence b, o the offsets; what lies in x beyond a
           length is not read, and a sequence longer than L has 0 for x from there on
Backward   dx_bt = dy_{o_b + t} for t < o_{b+1} - o_b, and 0 in the padding;
           dc_b = sum over the rows i of b of dy_i

Forward schedule: a program owns (sequence, tile of positions, tile of columns); the grid goes to the longest
sequence, and tiles beyond an end leave at once.
Backward schedule: what is stored is the dense dx, so its owners are tiles of (sequence, position), which
gather their rows where there are some and store zeros elsewhere: the padding needs no fill of its own. dc is
a sum over a sequence, whose rows lie together; making its programs walk the sequence means one read of dy
more than needed, but splitting it over the tiles of dx would take atomics or parts for a few rows each. The
walk begins at the offset and ends at the next: what a dense sum would spend on padding is not there.

op: dense_to_jagged
schedule: gather_transpose, swap_owner
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 16, "BLOCK_D": 128}


@triton.jit
def pack_kernel(
    x_ptr, c_ptr, offsets_ptr, y_ptr, L, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + b)
    length = tl.load(offsets_ptr + b + 1) - begin
    if tl.program_id(1) * BLOCK_T < length:
        mask = (t[:, None] < length) & (d[None, :] < D)
        inside = mask & (t[:, None] < L)
        x = tl.load(x_ptr + (b * L + t[:, None]) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + b * D + d, mask=d < D, other=0.0).to(tl.float32)
        y = x + c[None, :]
        tl.store(y_ptr + (begin + t[:, None]) * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def dense_to_jagged(x, c, offsets, rows, longest):
    """x: (B, L, D); c: (B, D); offsets: int64 (B + 1), from 0 to rows, not decreasing; longest: no less than
    any sequence. Gives (rows, D)."""
    B, L, D = x.shape
    if c.shape != (B, D) or offsets.numel() != B + 1:
        raise ValueError(f"x {tuple(x.shape)}, c {tuple(c.shape)} and {offsets.numel()} offsets do not fit")
    y = torch.empty((rows, D), device=x.device, dtype=x.dtype)
    grid = (B, triton.cdiv(longest, TILE["BLOCK_T"]), triton.cdiv(D, TILE["BLOCK_D"]))
    pack_kernel[grid](x.contiguous(), c.contiguous(), offsets.contiguous(), y, L, D, **TILE)
    return y


def reference(x, c, offsets, rows, longest):
    parts, L = [x.new_zeros(0, x.shape[2])], x.shape[1]
    for b, length in enumerate(offsets.diff().tolist()):
        own = torch.nn.functional.pad(x[b, :length], (0, 0, 0, max(0, length - L)))
        parts.append(own + c[b])
    return torch.cat(parts)


SWEEP = [{"B": 64, "L": 1024, "D": 512}, {"B": 201, "L": 150, "D": 333}]
SWEEP_CPU = [{"B": 4, "L": 15, "D": 18}, {"B": 2, "L": 40, "D": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, L, D = dims["B"], dims["L"], dims["D"]
    lengths = torch.randint(0, L + 1, (B,), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    x = torch.randn(B, L, D, device=device, dtype=dtype)
    return x, torch.randn(B, D, device=device, dtype=dtype), offsets, int(offsets[-1]), L


# ---- backward ----


@triton.jit
def unpack_kernel(dy_ptr, offsets_ptr, dx_ptr, L, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(offsets_ptr + b)
    length = tl.load(offsets_ptr + b + 1) - begin
    mask = (t[:, None] < L) & (d[None, :] < D)
    there = mask & (t[:, None] < length)
    dy = tl.load(dy_ptr + (begin + t[:, None]) * D + d[None, :], mask=there, other=0.0)
    tl.store(dx_ptr + (b * L + t[:, None]) * D + d[None, :], dy, mask=mask)


@triton.jit
def bias_kernel(dy_ptr, offsets_ptr, dc_ptr, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(offsets_ptr + b + 1)
    dc = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + b), end, BLOCK_T):
        i = start + tl.arange(0, BLOCK_T)
        mask = (i[:, None] < end) & (d[None, :] < D)
        dc += tl.load(dy_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dc_ptr + b * D + d, tl.sum(dc, axis=0).to(dc_ptr.dtype.element_ty), mask=d < D)


class DenseToJagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c, offsets, rows, longest):
        offsets = offsets.contiguous()
        ctx.save_for_backward(offsets)
        ctx.x_shape, ctx.c_dtype = x.shape, c.dtype
        return dense_to_jagged(x, c, offsets, rows, longest)

    @staticmethod
    def backward(ctx, dy):
        (offsets,) = ctx.saved_tensors
        (B, L, D), dy = ctx.x_shape, dy.contiguous()
        wide = triton.cdiv(D, TILE["BLOCK_D"])
        dx = dc = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty((B, L, D), device=dy.device, dtype=dy.dtype)
            unpack_kernel[(B, triton.cdiv(L, TILE["BLOCK_T"]), wide)](dy, offsets, dx, L, D, **TILE)
        if ctx.needs_input_grad[1]:
            dc = torch.empty((B, D), device=dy.device, dtype=ctx.c_dtype)
            bias_kernel[(B, wide)](dy, offsets, dc, D, **TILE)
        return dx, dc, None, None, None


def dense_to_jagged_autograd(x, c, offsets, rows, longest):
    return DenseToJagged.apply(x, c, offsets, rows, longest)
