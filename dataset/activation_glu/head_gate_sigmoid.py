"""A gate for each head of attention's output, before the output projection.

Forward    y_thd = o_thd s(a_th) for token t and head h,  s the sigmoid
Backward   do = dy s(a),  da_th = s(a_th) s(-a_th) sum_d dy_thd o_thd

Forward schedule: (token, head) is a row of D = 64 to 256 numbers, so a program owns several rows, whole.
Backward schedule: the same tile of rows. da is a sum along a row that the tile holds, so one read of o and dy
gives do and da, and no pass is a reduction of its own. The number of rows in a tile matters: with one row
a program, most lanes of a short head would be idle; with a row split over programs, da would need
partials. The gate of a row is made once, and its slope with it, from sigmoids of both
signs: for a head that is open, 1 - s(a) would be 0 while s(-a) is a small number.

op: head_gate
schedule: row_reduce_correct, same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(rows, D):
    """The grid and the tile of whole rows."""
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_R = max(1, 2048 // BLOCK_D)
    return (triton.cdiv(rows, BLOCK_R),), {"BLOCK_R": BLOCK_R, "BLOCK_D": BLOCK_D}


@triton.jit
def head_gate_kernel(o_ptr, a_ptr, y_ptr, R, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < R) & (d[None, :] < D)
    offs = rows[:, None] * D + d[None, :]
    gate = tl.sigmoid(tl.load(a_ptr + rows, mask=rows < R, other=0.0).to(tl.float32))
    o = tl.load(o_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (o * gate[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def head_gate(o, a):
    """o: (tokens, heads, D); a: (tokens, heads)."""
    T, H, D = o.shape
    if a.shape != (T, H) or D > 1024:
        raise ValueError("a has a number for each head of o, and a head of up to 1024 fits a tile")
    y = torch.empty((T, H, D), device=o.device, dtype=o.dtype)
    grid, blocks = tiling(T * H, D)
    head_gate_kernel[grid](o.contiguous(), a.contiguous(), y, T * H, D, **blocks)
    return y


def reference(o, a):
    return o * torch.sigmoid(a)[..., None]


SWEEP = [{"T": 16384, "H": 32, "D": 128}, {"T": 8191, "H": 12, "D": 80}]
SWEEP_CPU = [{"T": 13, "H": 5, "D": 40}, {"T": 70, "H": 3, "D": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, H = dims["T"], dims["H"]
    o = torch.randn(T, H, dims["D"], device=device, dtype=dtype)
    return o, 2 * torch.randn(T, H, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def head_gate_backward_kernel(
    o_ptr, a_ptr, dy_ptr, do_ptr, da_ptr, R, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < R) & (d[None, :] < D)
    offs = rows[:, None] * D + d[None, :]
    a = tl.load(a_ptr + rows, mask=rows < R, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(a)
    da = gate * tl.sigmoid(-a) * tl.sum(dy * o, axis=1)
    tl.store(do_ptr + offs, (dy * gate[:, None]).to(do_ptr.dtype.element_ty), mask=mask)
    tl.store(da_ptr + rows, da.to(da_ptr.dtype.element_ty), mask=rows < R)


class HeadGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, a):
        o, a = o.contiguous(), a.contiguous()
        ctx.save_for_backward(o, a)
        return head_gate(o, a)

    @staticmethod
    def backward(ctx, dy):
        o, a = ctx.saved_tensors
        do, da = torch.empty_like(o), torch.empty_like(a)
        grid, blocks = tiling(a.numel(), o.shape[2])
        head_gate_backward_kernel[grid](o, a, dy.contiguous(), do, da, a.numel(), o.shape[2], **blocks)
        return do if ctx.needs_input_grad[0] else None, da if ctx.needs_input_grad[1] else None


def head_gate_autograd(o, a):
    return HeadGate.apply(o, a)
