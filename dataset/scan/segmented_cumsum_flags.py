"""Running sum that starts anew wherever a flag is set.

Forward    y_t = x_t + (0 if f_t else y_{t-1})
Backward   dy_t reaches x_s, s <= t, unless a flag lies in s + 1 .. t:   dx_s = dy_s + (0 if f_{s+1} else
           dx_{s+1})

Forward schedule: a program owns a row in one tile, and scans pairs (f, x) under (f, x) + (g, y) = (f or g, y
if g else x + y), which is associative. Subtracting a plain running sum at the starts would do with one
number, but loses small segments behind large ones.
Backward schedule: the same scan from right to left. What stops it is not the element's own flag but its right
neighbour's, so the flags are loaded one place further on; beyond the row there is none. Only the flags are
kept, and each element is read and written once.

op: segmented_cumsum
schedule: reverse_scan
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def restart(f, x, g, y):
    return f | g, tl.where(g != 0, y, x + y)


@triton.jit
def segmented_cumsum_kernel(
    x_ptr, flag_ptr, y_ptr, N, SHIFT: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    flag = tl.load(flag_ptr + row + cols + SHIFT, mask=cols + SHIFT < N, other=0).to(tl.int32)
    _, y = tl.associative_scan((flag, x), 0, restart, reverse=REVERSE)
    tl.store(y_ptr + row + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def scan_rows(x, flags, reverse):
    N = x.shape[-1]
    if flags.shape != x.shape:
        raise ValueError("x and flags must have one shape")
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    segmented_cumsum_kernel[(x.numel() // N,)](
        x, flags, y, N, SHIFT=int(reverse), REVERSE=reverse, BLOCK=triton.next_power_of_2(N)
    )
    return y


@autodiff(inputs_require_grad=(0,))
def segmented_cumsum(x, flags):
    """x, flags: (..., N); flags: int8, not 0 where a segment starts."""
    return scan_rows(x.contiguous(), flags.contiguous(), False)


def reference(x, flags):
    segment = (flags != 0).cumsum(-1)
    same = segment[..., :, None] == segment[..., None, :]
    return (x[..., None, :] * same.tril()).sum(-1)


SWEEP = [{"M": 8192, "N": 1024}, {"M": 1021, "N": 1500}]
SWEEP_CPU = [{"M": 5, "N": 37}, {"M": 2, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, (torch.rand(x.shape, device=device) < 0.1).to(torch.int8)


# ---- backward ----


class SegmentedCumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flags):
        flags = flags.contiguous()
        ctx.save_for_backward(flags)
        return scan_rows(x.contiguous(), flags, False)

    @staticmethod
    def backward(ctx, dy):
        (flags,) = ctx.saved_tensors
        return scan_rows(dy.contiguous(), flags, True), None


def segmented_cumsum_autograd(x, flags):
    return SegmentedCumsum.apply(x, flags)
