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


def popcount(x: torch.Tensor) -> torch.Tensor:
    bits = 8 * x.element_size()
    return sum(((x >> bit) & 1 for bit in range(bits)), torch.zeros_like(x)).to(torch.int32)


def leading_zeros(x: torch.Tensor) -> torch.Tensor:
    bits = 8 * x.element_size()
    zeros = torch.full_like(x, bits)
    for bit in range(bits):
        zeros = torch.where(((x >> bit) & 1) == 1, bits - 1 - bit, zeros)
    return zeros.to(torch.int32)


# Functions that torch calls by the same name; further names after it.
SAME = """abs fabs|acos|acosh|asin|asinh|atan|atan2|atanh|ceil|copysign|cos fast_cos|cosh|erf|erfc|erfinv
    |exp fast_exp|exp2|expm1|floor|fmod|hypot|lgamma|log fast_log|log10 fast_log10|log1p|log2 fast_log2
    |pow fast_pow powi|rsqrt|sin fast_sin|sinh|sqrt|tan fast_tan|tanh fast_tanh|trunc|isnan isnand
    |isinf isinfd|signbit signbitd"""
ONE_NAME: dict[str, Function] = {
    **{names: getattr(torch, names.split()[0]) for names in SAME.split("|")},
    "cbrt": cbrt,
    "cospi": lambda x: torch.cos(math.pi * x),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "exp10 fast_exp10": lambda x: torch.exp(x * math.log(10.0)),
    "fdim": lambda x, y: torch.where(x > y, x - y, torch.zeros_like(x)),
    "fma": lambda x, y, z: x * y + z,
    "fmax": lambda x, y: torch.where(x > y, x, y),
    "fmin": lambda x, y: torch.where(x < y, x, y),
    "nearbyint rint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "rcbrt": lambda x: 1.0 / cbrt(x),
    "remainder": lambda x, y: x - y * torch.round(x / y),
    "rhypot": lambda x, y: 1.0 / torch.hypot(x, y),
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
    "saturate": lambda x: torch.clamp(x, 0.0, 1.0),
    "sinpi": lambda x: torch.sin(math.pi * x),
    "tgamma": lambda x: torch.exp(torch.lgamma(x)),
    "finite isfinited": torch.isfinite,
    "fast_fdivide": torch.div,
    "popc popcll": popcount,
    "clz clzll": leading_zeros,
}
ROUNDED: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "sqrt", "rsqrt")},
    "rcp": torch.reciprocal,
    "fma": ONE_NAME["fma"],
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
