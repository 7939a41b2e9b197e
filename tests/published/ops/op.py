"""Device functions under the names that kernels take them by."""

import os

import triton
import triton.language as tl

try:
    from triton.language.extra import libdevice as tldevice
except ImportError:  # before Triton 3
    import triton.language.math as tldevice

if os.environ.get("USE_FAST_OPS", "0") == "1":
    exp = tldevice.fast_expf
    exp2 = tldevice.exp2
    log = tldevice.fast_logf
else:
    exp = tl.exp
    exp2 = tl.exp2
    log = tl.log

RCP_LN2: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def safe_exp(x):
    return exp(tl.where(x <= 0, x, float("-inf")))


@triton.jit
def softplus(x, beta: tl.constexpr = 1.0, threshold: tl.constexpr = 20.0):
    bx = x * beta
    return tl.where(bx < threshold, log(1.0 + exp(bx)) / beta, x)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)
