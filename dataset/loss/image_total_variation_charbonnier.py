"""Total variation of images, smoothed at 0, a penalty on what jumps between neighbouring pixels.

Forward    at pixel (r, c) of a plane:  a = x_{r,c+1} - x_{r,c},  b = x_{r+1,c} - x_{r,c}, each 0 at the last
           column or row;  v_rc = (a^2 + b^2 + e^2)^(1/2) - e;  L = mean of v over all pixels
Backward   w_rc = dL / (n (a^2 + b^2 + e^2)^(1/2)):  pixel (r, c) takes part in its own v, in that of its left
           neighbour, and in that of its upper one:
           dx_rc = w_{r,c-1} a_{r,c-1} + w_{r-1,c} b_{r-1,c} - w_rc (a_rc + b_rc)

Forward schedule: a program owns a tile of rows by columns of a plane and reads it and its two shifts; the
parts of the mean are added by one program.
Backward schedule: the adjoint of a difference is a difference, taken the other way. Scattering +w a and -w a
to two pixels would be atomics on neighbours; instead the owner of a tile of dx gathers: it makes the terms at
three places, its own, one to the left, one above, from pixels that are all within one row and column of its
tile, in cache. Three roots a pixel in place of one are hidden behind memory; nothing is saved but x.

op: total_variation
schedule: gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 8, "BLOCK_C": 64}


@triton.jit
def load_pixels(x_ptr, r, c, R, C):
    """The pixels of a tile; those outside the plane stand for 0 and are not to be used."""
    inside = (r[:, None] >= 0) & (r[:, None] < R) & (c[None, :] >= 0) & (c[None, :] < C)
    plane = tl.program_id(2).to(tl.int64) * R * C
    return tl.load(x_ptr + plane + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def differences(x_ptr, r, c, R, C, e):
    """a, b and the root at a tile of places; a and b are 0 where a neighbour is missing."""
    x = load_pixels(x_ptr, r, c, R, C)
    here = (r[:, None] >= 0) & (c[None, :] >= 0)
    right = here & (c[None, :] + 1 < C) & (r[:, None] < R)
    below = here & (r[:, None] + 1 < R) & (c[None, :] < C)
    a = tl.where(right, load_pixels(x_ptr, r, c + 1, R, C) - x, 0.0)
    b = tl.where(below, load_pixels(x_ptr, r + 1, c, R, C) - x, 0.0)
    return a, b, tl.sqrt(a * a + b * b + e * e)


@triton.jit
def variation_kernel(x_ptr, part_ptr, R, C, e, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    _, _, root = differences(x_ptr, r, c, R, C, e)
    v = tl.where((r[:, None] < R) & (c[None, :] < C), root - e, 0.0)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    slot = tl.program_id(2).to(tl.int64) * tiles + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + slot, tl.sum(tl.sum(v, axis=1), axis=0))


@triton.jit
def mean_kernel(part_ptr, loss_ptr, parts, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / n)


@autodiff(inputs_require_grad=(0,))
def total_variation(x, e=0.01):
    """x: (planes, R, C); e: the size of a jump that counts as one; gives one number in float32."""
    x, (planes, R, C) = x.contiguous(), x.shape
    grid = (triton.cdiv(C, TILE["BLOCK_C"]), triton.cdiv(R, TILE["BLOCK_R"]), planes)
    parts = grid[0] * grid[1] * planes
    part = torch.empty(parts, device=x.device, dtype=torch.float32)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    variation_kernel[grid](x, part, R, C, e, **TILE)
    mean_kernel[(1,)](part, loss, parts, x.numel(), BLOCK=1024)
    return loss


def reference(x, e=0.01):
    a = torch.nn.functional.pad(x[:, :, 1:] - x[:, :, :-1], (0, 1))
    b = torch.nn.functional.pad(x[:, 1:] - x[:, :-1], (0, 0, 0, 1))
    return (torch.sqrt(a * a + b * b + e * e) - e).mean()


SWEEP = [{"planes": 24, "R": 1024, "C": 1024}, {"planes": 7, "R": 1081, "C": 1921}]
SWEEP_CPU = [{"planes": 2, "R": 11, "C": 70}, {"planes": 3, "R": 17, "C": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.rand(dims["planes"], dims["R"], dims["C"], device=device).to(dtype),)


# ---- backward ----


@triton.jit
def variation_backward_kernel(
    x_ptr, dloss_ptr, dx_ptr, R, C, n, e, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    a, b, root = differences(x_ptr, r, c, R, C, e)
    from_left, _, left_root = differences(x_ptr, r, c - 1, R, C, e)
    _, from_above, above_root = differences(x_ptr, r - 1, c, R, C, e)
    dx = from_left / left_root + from_above / above_root - (a + b) / root
    dx *= tl.load(dloss_ptr).to(tl.float32) / n
    offs = tl.program_id(2).to(tl.int64) * R * C + r[:, None] * C + c[None, :]
    mask = (r[:, None] < R) & (c[None, :] < C)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class TotalVariation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, e):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.e = e
        return total_variation(x, e)

    @staticmethod
    def backward(ctx, dloss):
        (x,) = ctx.saved_tensors
        dx, (planes, R, C) = torch.empty_like(x), x.shape
        grid = (triton.cdiv(C, TILE["BLOCK_C"]), triton.cdiv(R, TILE["BLOCK_R"]), planes)
        variation_backward_kernel[grid](x, dloss, dx, R, C, x.numel(), ctx.e, **TILE)
        return dx, None


def total_variation_autograd(x, e=0.01):
    return TotalVariation.apply(x, e)
