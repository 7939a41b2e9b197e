"""Dynamic tanh: gamma * tanh(alpha x) + beta, a two-dimensional grid of rows and blocks of columns."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import ensure_contiguous, is_hip

try:
    from triton.language.extra.libdevice import tanh
except ModuleNotFoundError:
    from triton.language.extra.cuda.libdevice import tanh


@triton.jit
def _dyt_fwd_kernel(
    X, Y, Alpha, Gamma, Beta, HAVE_BETA: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr = 1024
):
    col = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = col < N
    row_id = tl.cast(tl.program_id(1), tl.int64)

    X += row_id * N
    Y += row_id * N
    alpha = tl.load(Alpha).to(tl.float32)

    gamma = tl.load(Gamma + col, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(X + col, mask=mask, other=0.0).to(tl.float32)
    tanh_x = tanh(alpha * x)
    y = tanh_x * gamma
    if HAVE_BETA:
        beta = tl.load(Beta + col, mask=mask, other=0.0).to(tl.float32)
        y += beta
    tl.store(Y + col, y, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
@ensure_contiguous
def dyt(x, alpha, gamma, beta=None):
    HAVE_BETA = beta is not None
    input_shape = x.shape
    x = x.view(-1, input_shape[-1])
    M, N = x.shape
    y = torch.empty_like(x)
    if N >= 4096:
        kwargs = {"BLOCK_N": min(triton.next_power_of_2(N), 2048), "num_warps": 4, "num_stages": 1}
    else:
        kwargs = {"BLOCK_N": min(triton.next_power_of_2(N), 1024), "num_warps": 4, "num_stages": 1}
    if is_hip():
        kwargs["num_warps"] = 8

    grid = lambda meta: (triton.cdiv(N, meta["BLOCK_N"]), M)
    _dyt_fwd_kernel[grid](x, y, alpha, gamma, beta, HAVE_BETA, N, **kwargs)
    return y.view(input_shape)


def reference(x, alpha, gamma, beta=None):
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


SWEEP = [
    {"B": 2, "T": 4, "N": 70, "beta": True},
    {"B": 1, "T": 5, "N": 33, "beta": False},
    {"B": 2, "T": 5, "N": 2500, "beta": True, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["N"], device=device, dtype=dtype)
    gamma = torch.rand(dims["N"], device=device, dtype=dtype)
    beta = torch.rand(dims["N"], device=device, dtype=dtype) if dims["beta"] else None
    return x, torch.full((1,), 0.7, device=device, dtype=dtype), gamma, beta
