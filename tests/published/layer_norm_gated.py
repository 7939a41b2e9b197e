"""Layer or RMS norm in groups of columns, with a gate before or after it, of which all is optional but x."""

import math

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard


@triton.heuristics(
    {
        "HAS_BIAS": lambda args: args["B"] is not None,
        "HAS_Z": lambda args: args["Z"] is not None,
    }
)
@triton.jit
def _layer_norm_fwd_1pass_kernel(
    X,  # pointer to the input
    Y,  # pointer to the output
    W,  # pointer to the weights
    B,  # pointer to the biases
    Z,  # pointer to the gate
    Mean,
    Rstd,
    stride_x_row,
    stride_y_row,
    stride_z_row,
    M,  # number of rows in X
    N,  # number of columns in a group
    eps,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_Z: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1)
    X += row * stride_x_row + group * N
    Y += row * stride_y_row + group * N
    if HAS_Z:
        Z += row * stride_z_row + group * N
    if not IS_RMS_NORM:
        Mean += group * M
    Rstd += group * M
    W += group * N
    if HAS_BIAS:
        B += group * N
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_Z and not NORM_BEFORE_GATE:
        z = tl.load(Z + cols, mask=cols < N).to(tl.float32)
        x *= z * tl.sigmoid(z)
    if not IS_RMS_NORM:
        mean = tl.sum(x, axis=0) / N
        tl.store(Mean + row, mean)
        xbar = tl.where(cols < N, x - mean, 0.0)
        var = tl.sum(xbar * xbar, axis=0) / N
    else:
        xbar = tl.where(cols < N, x, 0.0)
        var = tl.sum(xbar * xbar, axis=0) / N
    rstd = 1 / tl.sqrt(var + eps)
    tl.store(Rstd + row, rstd)
    mask = cols < N
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(B + cols, mask=mask).to(tl.float32)
    x_hat = (x - mean) * rstd if not IS_RMS_NORM else x * rstd
    y = x_hat * w + b if HAS_BIAS else x_hat * w
    if HAS_Z and NORM_BEFORE_GATE:
        z = tl.load(Z + cols, mask=mask).to(tl.float32)
        y *= z * tl.sigmoid(z)
    tl.store(Y + cols, y, mask=mask)


def _layer_norm_fwd(
    x, weight, bias, eps, z=None, out=None, group_size=None, norm_before_gate=True, is_rms_norm=False
):
    M, N = x.shape
    if group_size is None:
        group_size = N
    assert N % group_size == 0
    ngroups = N // group_size
    assert x.stride(-1) == 1
    if z is not None:
        assert z.stride(-1) == 1
        assert z.shape == (M, N)
    assert weight.shape == (N,)
    if bias is not None:
        assert bias.shape == (N,)
    if out is not None:
        assert out.shape == x.shape
    else:
        out = torch.empty_like(x)
    assert out.stride(-1) == 1
    mean = torch.empty((ngroups * M,), dtype=torch.float32, device=x.device) if not is_rms_norm else None
    rstd = torch.empty((ngroups * M,), dtype=torch.float32, device=x.device)
    MAX_FUSED_SIZE = 65536 // x.element_size()
    BLOCK_N = min(MAX_FUSED_SIZE, triton.next_power_of_2(group_size))
    if group_size > BLOCK_N:
        raise RuntimeError("This layer norm doesn't support feature dim >= 64KB.")
    num_warps = min(max(BLOCK_N // 256, 1), 8)
    grid = (M, ngroups)
    _layer_norm_fwd_1pass_kernel[grid](
        x, out, weight, bias, z, mean, rstd,
        x.stride(0), out.stride(0), z.stride(0) if z is not None else 0,
        M, group_size, eps,
        BLOCK_N=BLOCK_N, NORM_BEFORE_GATE=norm_before_gate, IS_RMS_NORM=is_rms_norm, num_warps=num_warps,
    )  # fmt: skip
    return out, mean, rstd


@autodiff(inputs_require_grad=(0, 1, 2, 3))
@input_guard
def layernorm_fn(
    x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False
):
    x_shape_og = x.shape
    x = x.reshape(-1, x.shape[-1])
    if z is not None:
        assert z.shape == x_shape_og
        z = z.reshape(-1, z.shape[-1])
    y, _mean, _rstd = _layer_norm_fwd(
        x,
        weight,
        bias,
        eps,
        z=z,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        is_rms_norm=is_rms_norm,
    )
    return y.reshape(x_shape_og)


SWEEP = [
    {"B": 2, "T": 5, "N": 72, "groups": 1, "z": True, "bias": True, "before": True, "rms": False},
    {"B": 2, "T": 3, "N": 96, "groups": 3, "z": True, "bias": False, "before": False, "rms": True},
    {"B": 1, "T": 7, "N": 40, "groups": 1, "z": False, "bias": True, "before": True, "rms": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["T"], dims["N"] // dims["groups"] * dims["groups"])
    x, z = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], device=device, dtype=dtype) for _ in range(2))
    args = (x, weight, bias if dims["bias"] else None, z if dims["z"] else None)
    size = None if dims["groups"] == 1 else math.prod(shape[-1:]) // dims["groups"]
    return args, {"group_size": size, "norm_before_gate": dims["before"], "is_rms_norm": dims["rms"]}
