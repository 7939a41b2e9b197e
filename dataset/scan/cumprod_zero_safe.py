"""Running product along the last axis, right for rows with zeros.

Forward    y_t = x_0 x_1 .. x_t
Backward   dy_t/dx_s = (x_0 .. x_{s-1}) (x_{s+1} .. x_t) for t >= s;  with r_s = dy_s + x_{s+1} r_{s+1}:
           dx_s = y_{s-1} r_s,  y_{-1} = 1

Forward schedule: a lane owns a row, a program walks a tile of rows along time.
Backward schedule: the same lanes walk from right to left with r in a register. The usual formula
revcumsum(dy * y) / x breaks at x = 0; this recurrence divides by nothing, needs only y_{s-1} and x_{s+1}
beside the carry, and reads each tensor once.

op: cumprod
schedule: reverse_scan
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def cumprod_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.full([BLOCK], 1.0, dtype=tl.float32)
    for t in range(N):
        y *= tl.load(x_ptr + rows * N + t, mask=rows < M, other=1.0).to(tl.float32)
        tl.store(y_ptr + rows * N + t, y, mask=rows < M)


@autodiff(inputs_require_grad=(0,))
def cumprod(x):
    x = x.contiguous()
    N = x.shape[-1]
    M = x.numel() // N
    y = torch.empty_like(x)
    cumprod_kernel[(triton.cdiv(M, 32),)](x, y, M, N, BLOCK=32)
    return y


def reference(x):
    return torch.cumprod(x, dim=-1)


SWEEP = [{"M": 65536, "N": 256}, {"M": 131072, "N": 64}, {"M": 40009, "N": 101}]
SWEEP_CPU = [{"M": 17, "N": 35}, {"M": 40, "N": 6}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 1 + 0.3 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    x[::3, dims["N"] // 2] = 0
    return (x,)


# ---- backward ----


@triton.jit
def cumprod_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    carry = tl.zeros([BLOCK], dtype=tl.float32)  # x_{s+1} r_{s+1}
    for step in range(N):
        s = N - 1 - step
        r = carry + tl.load(dy_ptr + rows * N + s, mask=rows < M, other=0.0).to(tl.float32)
        before = tl.load(y_ptr + rows * N + s - 1, mask=(rows < M) & (s > 0), other=1.0).to(tl.float32)
        tl.store(dx_ptr + rows * N + s, before * r, mask=rows < M)
        carry = r * tl.load(x_ptr + rows * N + s, mask=rows < M, other=0.0).to(tl.float32)


class Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = cumprod(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        dy = dy.contiguous()
        N = x.shape[-1]
        M = x.numel() // N
        dx = torch.empty_like(x)
        cumprod_backward_kernel[(triton.cdiv(M, 32),)](x, y, dy, dx, M, N, BLOCK=32)
        return dx


def cumprod_autograd(x):
    return Cumprod.apply(x)
