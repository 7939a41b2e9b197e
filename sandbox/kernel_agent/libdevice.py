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


def reversed_bits(x: torch.Tensor) -> torch.Tensor:
    bits = 8 * x.element_size()
    return sum((((x >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)), torch.zeros_like(x))


def first_bit(x: torch.Tensor) -> torch.Tensor:
    """The place of the lowest bit that is set, counted from 1; 0 for 0."""
    return torch.where(x == 0, torch.zeros_like(x), popcount(x ^ (x - 1)).to(x.dtype)).to(torch.int32)


def bytes_of(x: torch.Tensor, y: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """Four of the eight bytes of x and y, picked by the low three bits of the selector's hex digits."""
    both = (x.long() & 0xFFFFFFFF) | (y.long() << 32)
    picked = [((both >> (8 * ((selector.long() >> 4 * at) & 7))) & 0xFF) << 8 * at for at in range(4)]
    return sum(picked, torch.zeros_like(both)).to(torch.int32)


def exponent(x: torch.Tensor) -> torch.Tensor:
    return torch.frexp(x.detach())[1] - 1


def float32_bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().view(torch.int32)


def float64_bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().view(torch.int64)


def next_after(x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """The neighbour in float32, which is what kernels compute in; its derivative is x's."""
    near = x.detach().float()
    return x + (torch.nextafter(near, to.detach().float()) - near).to(x.dtype)


def unsigned(x: torch.Tensor) -> torch.Tensor:
    """Integers as what they are without a sign, in float64."""
    value = x.double()
    return torch.where(x < 0, value + 2.0 ** (8 * x.element_size()), value)


def high_half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The upper half of a product of signed integers."""
    bits = 8 * x.element_size()
    return torch.tensor(
        [(a * b) >> bits for a, b in zip(x.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True)],
        dtype=x.dtype,
        device=x.device,
    ).reshape(x.shape)


def unsigned_high_half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(x)
    return high_half(x, y) + torch.where(x < 0, y, zero) + torch.where(y < 0, x, zero)


def low_24(x: torch.Tensor) -> torch.Tensor:
    return (x << 8) >> 8


def norm(*parts: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(sum((part * part for part in parts[1:]), parts[0] * parts[0]))


def absolute_difference(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.abs(x.long() - y.long()).to(x.dtype) + z


def unsigned_difference(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.abs((x.long() & 0xFFFFFFFF) - (y.long() & 0xFFFFFFFF)).to(x.dtype) + z


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
    "brev brevll": reversed_bits,
    "ffs ffsll": first_bit,
    "byte_perm": bytes_of,
    "llabs": torch.abs,
    "erfcinv": lambda x: torch.erfinv(1.0 - x),
    "logb": lambda x: exponent(x).to(x.dtype),
    "ilogb": exponent,
    "ldexp scalbn": lambda x, power: x * torch.exp2(power.to(x.dtype)),
    "nextafter": next_after,
    "norm3d norm4d": norm,
    "rnorm3d rnorm4d": lambda *parts: 1.0 / norm(*parts),
    "llrint": lambda x: torch.round(x.detach()).long(),
    "llround": lambda x: ONE_NAME["round"](x.detach()).long(),
    "mulhi mul64hi": high_half,
    "umulhi umul64hi": unsigned_high_half,
    "mul24": lambda x, y: low_24(x) * low_24(y),
    "umul24": lambda x, y: (x & 0xFFFFFF) * (y & 0xFFFFFF),
    "hadd": lambda x, y: ((x.long() + y.long()) >> 1).to(x.dtype),
    "rhadd": lambda x, y: ((x.long() + y.long() + 1) >> 1).to(x.dtype),
    "uhadd": lambda x, y: ((unsigned(x) + unsigned(y)) / 2).floor().long().to(x.dtype),
    "urhadd": lambda x, y: ((unsigned(x) + unsigned(y) + 1) / 2).floor().long().to(x.dtype),
    "sad": absolute_difference,
    "usad": unsigned_difference,
    "float_as_int float_as_uint": float32_bits,
    "double_as_longlong": float64_bits,
    "int_as_float uint_as_float": lambda x: x.view(torch.float32),
    "longlong_as_double": lambda x: x.view(torch.float64),
    "double2loint": lambda x: float64_bits(x).to(torch.int32),
    "double2hiint": lambda x: (float64_bits(x) >> 32).to(torch.int32),
    "hiloint2double": lambda high, low: ((high.long() << 32) | (low.long() & 0xFFFFFFFF)).view(torch.float64),
}
# Bessel functions, which torch cannot differentiate, and the upper half of a double's reciprocal.
UNSUPPORTED = {"j0", "j1", "jn", "y0", "y1", "yn", "rcp64h"}
ROUNDED: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "sqrt", "rsqrt")},
    "rcp": torch.reciprocal,
    "fma": ONE_NAME["fma"],
}


WAYS: dict[str, Function] = {"rn": torch.round, "rz": torch.trunc, "rd": torch.floor, "ru": torch.ceil}


def _to_integer(way: Function) -> Function:
    """Bits of 64, of which a 32-bit result keeps the low ones."""
    return lambda x: way(x.detach()).long()


def _conversions() -> dict[str, Function]:
    """Between floats and integers: `float2uint_rz`, `ull2double_rn`. The result's type rounds a float."""
    table: dict[str, Function] = {}
    for way, rounded in WAYS.items():
        table[f"double2float_{way}"] = lambda x: x
        for real in ("float", "double"):
            for kind in ("int", "uint", "ll", "ull"):
                table[f"{kind}2{real}_{way}"] = unsigned if kind[0] == "u" else torch.Tensor.double
                table[f"{real}2{kind}_{way}"] = _to_integer(rounded)
    return table


def _table() -> dict[str, Function]:
    table: dict[str, Function] = {}
    for names, function in ONE_NAME.items():
        for name in names.split():
            table[f"__nv_{name}"] = table[f"__nv_{name}f"] = function
    for name, function in ROUNDED.items():
        for direction in ("rn", "rz", "rd", "ru"):
            table[f"__nv_{name}_{direction}"] = function
            for symbol in (f"f{name}_{direction}", f"d{name}_{direction}", f"{name}f_{direction}"):
                table[f"__nv_{symbol}"] = function
    return table | {f"__nv_{name}": function for name, function in _conversions().items()}


FUNCTIONS = _table()
