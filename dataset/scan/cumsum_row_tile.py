"""Running sum along the last axis.

Forward    y_t = sum_{s <= t} x_s
Backward   dx_s = sum_{t >= s} dy_t, the running sum taken from the right

Forward schedule: a program owns a row in one tile and scans it.
Backward schedule: the same tile scanned in reverse. Nothing is saved, each element is read and written
once.

op: cumsum
schedule: reverse_scan
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def cumsum_kernel(x_ptr, y_ptr, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + cols, tl.cumsum(x, axis=0, reverse=REVERSE), mask=cols < N)


def scan_rows(x, reverse):
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(N)
    warps = 4 if BLOCK <= 2048 else 16
    cumsum_kernel[(x.numel() // N,)](x, y, N, REVERSE=reverse, BLOCK=BLOCK, num_warps=warps)
    return y


@autodiff(inputs_require_grad=(0,))
def cumsum(x):
    return scan_rows(x.contiguous(), False)


def reference(x):
    return torch.cumsum(x, dim=-1)


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4096, "N": 16384}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 21, "N": 60}, {"M": 2, "N": 257}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


class Cumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return cumsum(x)

    @staticmethod
    def backward(ctx, dy):
        return scan_rows(dy.contiguous(), True)


def cumsum_autograd(x):
    return Cumsum.apply(x)
