"""External (libdevice) functions by symbol, as torch functions on float or integer tensors of one shape.

Symbols come in a double and a float spelling (`__nv_tanh`, `__nv_tanhf`); both map to the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Function = Callable[..., torch.Tensor]


def cbrt(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * torch.abs(x) ** (1.0 / 3.0)


def normcdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def popcount(x: torch.Tensor) -> torch.Tensor:
    bits = 8 * x.element_size()
    return sum(((x >> bit) & 1 for bit in range(bits)), torch.zeros_like(x)).to(torch.int32)


def leading_zeros(x: torch.Tensor) -> torch.Tensor:
    bits = 8 * x.element_size()
    zeros = torch.full_like(x, bits)
    for bit in range(bits):
        zeros = torch.where(((x >> bit) & 1) == 1, bits - 1 - bit, zeros)
    return zeros.to(torch.int32)


ONE_NAME: dict[str, Function] = {
    "abs fabs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "cbrt": cbrt,
    "ceil": torch.ceil,
    "copysign": torch.copysign,
    "cos fast_cos": torch.cos,
    "cosh": torch.cosh,
    "cospi": lambda x: torch.cos(math.pi * x),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp fast_exp": torch.exp,
    "exp10 fast_exp10": lambda x: torch.exp(x * math.log(10.0)),
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fdim": lambda x, y: torch.where(x > y, x - y, torch.zeros_like(x)),
    "floor": torch.floor,
    "fma": lambda x, y, z: x * y + z,
    "fmax": lambda x, y: torch.where(x > y, x, y),
    "fmin": lambda x, y: torch.where(x < y, x, y),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "lgamma": torch.lgamma,
    "log fast_log": torch.log,
    "log10 fast_log10": torch.log10,
    "log1p": torch.log1p,
    "log2 fast_log2": torch.log2,
    "nearbyint rint": torch.round,
    "normcdf": normcdf,
    "normcdfinv": torch.special.ndtri,
    "pow fast_pow powi": torch.pow,
    "rcbrt": lambda x: 1.0 / cbrt(x),
    "remainder": lambda x, y: x - y * torch.round(x / y),
    "rhypot": lambda x, y: 1.0 / torch.hypot(x, y),
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
    "rsqrt": torch.rsqrt,
    "saturate": lambda x: torch.clamp(x, 0.0, 1.0),
    "sin fast_sin": torch.sin,
    "sinh": torch.sinh,
    "sinpi": lambda x: torch.sin(math.pi * x),
    "sqrt": torch.sqrt,
    "tan fast_tan": torch.tan,
    "tanh fast_tanh": torch.tanh,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)),
    "trunc": torch.trunc,
    "isnan isnand": torch.isnan,
    "isinf isinfd": torch.isinf,
    "finite isfinited": torch.isfinite,
    "signbit signbitd": torch.signbit,
    "fast_fdivide": torch.div,
    "popc popcll": popcount,
    "clz clzll": leading_zeros,
}
ROUNDED: dict[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "rcp": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "fma": lambda x, y, z: x * y + z,
}


def _table() -> dict[str, Function]:
    table: dict[str, Function] = {}
    for names, function in ONE_NAME.items():
        for name in names.split():
            table[f"__nv_{name}"] = table[f"__nv_{name}f"] = function
    for name, function in ROUNDED.items():
        for direction in ("rn", "rz", "rd", "ru"):
            table[f"__nv_{name}_{direction}"] = function
            table[f"__nv_f{name}_{direction}"] = table[f"__nv_d{name}_{direction}"] = function
    return table


FUNCTIONS = _table()
