"""Functions of numbers, by the names that triton.language and libdevice have for them.

UNARY and BINARY are those with a rule of their own (`reverse/derivatives.py`). Of the others, ALIASES are one
of those under another name, called by their own name again where the backward needs the value; EXPANDED are
written out in primitives; STEPS are constant between their jumps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..ir.kinds import words
from ..ir.nodes import Node

if TYPE_CHECKING:
    from .normalise import Builder

UNARY = words(
    """exp exp2 exp10 expm1 log log2 log10 log1p sqrt rsqrt cbrt rcbrt sin cos tan sinpi cospi sinh cosh tanh
    asin acos atan asinh acosh atanh sigmoid abs erf erfc erfcx erfinv erfcinv normcdf normcdfinv
    cyl_bessel_i0 cyl_bessel_i1"""
)
BINARY = words("pow atan2 fmod remainder")
ALIASES = {
    "fabs": "abs",
    "fast_powf": "pow",
    **{f"sqrt_{way}": "sqrt" for way in ("rn", "rz", "rd", "ru")},
    "rsqrt_rn": "rsqrt",
    **{f"fast_{name}f": name for name in ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan")},
}
# The type of the result where it is not the argument's.
STEPS: dict[str, str | None] = {
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "rint", "nearbyint", "logb")),
    **dict.fromkeys(("isnan", "isinf", "signbit", "finitef", "isfinited"), "int32"),
    **dict.fromkeys(("llrint", "llround"), "int64"),
    "ilogb": "int32",
    **{f"float2{kind}_{way}": "int32" for kind in ("int", "uint") for way in ("rn", "rz", "rd", "ru")},
    **{f"float2{kind}_{way}": "int64" for kind in ("ll", "ull") for way in ("rn", "rz", "rd", "ru")},
    "isnan": "int1",
}


def _norm(b: Builder, *args: Node) -> Node:
    g = b.g
    return g.call("sqrt", functools.reduce(g.add, [g.mul(x, x) for x in args]))


def _inverse_norm(b: Builder, *args: Node) -> Node:
    return b.g.call("rsqrt", _norm(b, *args).args[0])


def _copysign(b: Builder, x: Node, sign: Node) -> Node:
    g = b.g
    size = g.call("abs", x)
    return g.where(g.compare("<", sign, g.number(0)), g.neg(size), size)


def _fdim(b: Builder, x: Node, y: Node) -> Node:
    g = b.g
    return g.where(g.compare(">", x, y), g.sub(x, y), g.number(0))


def _reciprocal(b: Builder, x: Node) -> Node:
    return b.g.div(b.g.number(1), x)


def _saturate(b: Builder, x: Node) -> Node:
    return b.g.make("clamp", (x, b.g.number(0), b.g.number(1)))


def _scaled(b: Builder, x: Node, power: Node) -> Node:
    return b.g.mul(x, b.g.call("exp2", b.g.cast(power, x.dtype)))


_WAYS: dict[str, Callable[..., Node]] = {
    "add": lambda b, x, y: b.g.add(x, y),
    "sub": lambda b, x, y: b.g.sub(x, y),
    "mul": lambda b, x, y: b.g.mul(x, y),
    "div": lambda b, x, y: b.g.div(x, y),
    "fma": lambda b, x, y, z: b.g.add(b.g.mul(x, y), z),
    "rcp": _reciprocal,
}
EXPANDED: dict[str, Callable[..., Node]] = {
    **{f"{name}_{way}": make for name, make in _WAYS.items() for way in ("rn", "rz", "rd", "ru")},
    "fast_dividef": _WAYS["div"],
    **dict.fromkeys(("hypot", "norm3d", "norm4d"), _norm),
    **dict.fromkeys(("rhypot", "rnorm3d", "rnorm4d"), _inverse_norm),
    "copysign": _copysign,
    "fdim": _fdim,
    "saturatef": _saturate,
    **dict.fromkeys(("ldexp", "scalbn"), _scaled),
}


def known(name: str) -> bool:
    return name in UNARY or name in BINARY or name in ALIASES or name in STEPS or name in EXPANDED


def call(b: Builder, name: str, text: str, args: list[Node]) -> Node:
    """A call of a known function, which the file spells `text`. TypeError: a wrong number of arguments."""
    if name in EXPANDED:
        return EXPANDED[name](b, *args)
    fn = ALIASES.get(name, name)
    if len(args) != (2 if fn in BINARY else 1):
        raise TypeError(f"{len(args)} arguments")
    dtype = STEPS.get(fn) or ("float32" if args[0].dtype.startswith("int") and fn != "abs" else None)
    return b.g.make("call", args, {"fn": fn, "text": text} | ({"steps": True} if fn in STEPS else {}), dtype)
