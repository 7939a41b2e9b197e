"""Running sum along rows that are long and few.

Forward    y_t = sum_{s <= t} x_s
Backward   dx_s = sum_{t >= s} dy_t, the running sum taken from the right

Forward schedule: three kernels. Sums of all blocks, in parallel; an exclusive scan of a row's block sums,
by one program a row; then every block scans itself and adds its carry.
Backward schedule: the same three kernels from right to left: the carry of a block becomes the sum of the
blocks after it. A single row fills the device, where one owner a row would walk it alone; the price is a
second read of dy.

op: cumsum
schedule: reverse_scan, chunk_state_pass
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def block_sums_kernel(x_ptr, sums_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(sums_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(x, axis=0))


@triton.jit
def carries_kernel(sums_ptr, carry_ptr, blocks, REVERSE: tl.constexpr, BLOCK_B: tl.constexpr):
    """carry = the sum of all blocks before (REVERSE: after) each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCK_B)
    sums = tl.load(sums_ptr + row * blocks + b, mask=b < blocks, other=0.0)
    tl.store(carry_ptr + row * blocks + b, tl.cumsum(sums, axis=0, reverse=REVERSE) - sums, mask=b < blocks)


@triton.jit
def scan_blocks_kernel(x_ptr, carry_ptr, y_ptr, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    carry = tl.load(carry_ptr + row * tl.num_programs(1) + tl.program_id(1))
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + cols, carry + tl.cumsum(x, axis=0, reverse=REVERSE), mask=cols < N)


def scan_rows(x, reverse):
    N = x.shape[-1]
    M, blocks = x.numel() // N, triton.cdiv(N, BLOCK)
    if blocks > 16384:
        raise ValueError(f"the block sums of a row of {N} do not fit one tile")
    y = torch.empty_like(x)
    sums, carry = (torch.empty((M, blocks), device=x.device, dtype=torch.float32) for _ in range(2))
    block_sums_kernel[(M, blocks)](x, sums, N, BLOCK=BLOCK)
    BLOCK_B = triton.next_power_of_2(blocks)
    carries_kernel[(M,)](
        sums, carry, blocks, REVERSE=reverse, BLOCK_B=BLOCK_B, num_warps=4 if BLOCK_B <= 2048 else 16
    )
    scan_blocks_kernel[(M, blocks)](x, carry, y, N, REVERSE=reverse, BLOCK=BLOCK)
    return y


@autodiff(inputs_require_grad=(0,))
def cumsum(x):
    return scan_rows(x.contiguous(), False)


def reference(x):
    return torch.cumsum(x, dim=-1)


SWEEP = [{"M": 16, "N": 1 << 20}, {"M": 64, "N": 262144}, {"M": 3, "N": 2000003}]
SWEEP_CPU = [{"M": 3, "N": 3000}, {"M": 5, "N": 1024}]


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
