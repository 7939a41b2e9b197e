"""Repairs of Triton's interpreter, applied once per process, without a change to the installed package.

- NumPy >= 2.4 refuses `int(array)` for one-element arrays that are not 0-dimensional, which the interpreter
  does for `range(0, K)` with a runtime K.
- bfloat16 lives in uint16 arrays there, and is truncated instead of rounded, added and multiplied as
  integers.
- Functions of libdevice are not implemented there.
- `triton.jit` decides when it decorates whether a kernel is compiled or interpreted. Kernels here are always
  decorated as compiled ones, so that one module serves both ways; interpret.py runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as _interp

from .libdevice import FUNCTIONS

_np_erf = np.vectorize(math.erf, otypes=[np.float64])


def _scalar(tensor: Any) -> Any:
    """The value of a one-element interpreter tensor; TypeError for anything larger, as in compiled code."""
    data = tensor.handle.data
    if data.size != 1:
        raise TypeError(f"a tensor of shape {tuple(data.shape)} is not a scalar")
    return data.reshape(()).item()


def _truth(tensor: Any) -> bool:
    data = tensor.handle.data
    # Only scalars have a truth value in compiled code; the interpreter asks larger tensors and expects True.
    return bool(data.reshape(()).item()) if data.size == 1 else True


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bfloat16 as float32 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float values rounded to the nearest bfloat16 (ties to even), as uint16 bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    """The same handle, in float32 if it was bfloat16."""
    return _interp.TensorHandle(bf16_to_f32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(data: np.ndarray) -> np.ndarray:
    """Results of bfloat16 arithmetic: floats are rounded back, comparisons stay bool."""
    return f32_to_bf16(data) if np.issubdtype(data.dtype, np.floating) else data


class Builder(_interp.InterpreterBuilder):
    """The interpreter's operations with bfloat16 arithmetic and libdevice."""

    def unary_op(self, arg: Any, op: Callable[..., np.ndarray]) -> Any:
        if not _is_bf16(arg):
            return super().unary_op(arg, op)
        return _interp.TensorHandle(_narrow(op(_widen(arg).data)), tl.bfloat16)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., np.ndarray]) -> Any:
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            return super().binary_op(lhs, rhs, op)
        return _interp.TensorHandle(_narrow(op(_widen(lhs).data, _widen(rhs).data)), tl.bfloat16)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., np.ndarray]) -> Any:
        # np.where moves bit patterns unchanged; only arithmetic needs the wider type.
        if op is np.where or not _is_bf16(other):
            return super().ternary_op(lhs, rhs, other, op)
        wide = [_widen(handle).data for handle in (lhs, rhs, other)]
        return _interp.TensorHandle(_narrow(op(*wide)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return super().create_fma(x, y, z)
        x, y, z = _widen(x), _widen(y), _widen(z)
        return _interp.TensorHandle(f32_to_bf16(x.data * y.data + z.data), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        if _is_bf16(src) and dst_type.scalar != tl.bfloat16:
            return super().cast_impl(_widen(src), dst_type)
        if dst_type.scalar == tl.bfloat16 and not _is_bf16(src):
            return _interp.TensorHandle(f32_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        return super().cast_impl(src, dst_type)

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.float64:  # Triton calls the product float64, whatever it is added to
            d = _interp.TensorHandle(d.data.astype(np.float64), tl.float64)
        return super().create_dot(_widen(a), _widen(b), d, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _is_bf16(val):
            raise NotImplementedError("atomics on bfloat16 are not supported by the interpreter")
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, args: list[Any], ret_type: Any, is_pure: bool
    ) -> Any:
        function = _LIBDEVICE.get(_stem(symbol)) or _as_torch_has_it(symbol)
        element = ret_type.scalar
        data = np.asarray(function(*[_widen(arg).data for arg in args]))
        return _interp.TensorHandle(data.astype(_interp._get_np_dtype(element)), element)


def _stem(symbol: str) -> str:
    """`__nv_tanhf` and `__nv_tanh` are both `tanh`."""
    name = symbol.removeprefix("__nv_")
    return name[:-1] if name.endswith("f") and name[:-1] in _LIBDEVICE else name


def _as_torch_has_it(symbol: str) -> Callable[..., np.ndarray]:
    """The rarer functions are the oracle's. Raises NotImplementedError where it has none either."""
    if symbol not in FUNCTIONS:
        raise NotImplementedError(f"libdevice function {symbol} is not supported by the interpreter")
    return lambda *args: FUNCTIONS[symbol](*map(_signed, args)).numpy()


def _signed(data: np.ndarray) -> torch.Tensor:
    """As the oracle has them: unsigned integers by their bits."""
    kind = data.dtype.kind
    return torch.from_numpy(np.array(data).view(f"i{data.dtype.itemsize}") if kind == "u" else np.array(data))


def _ufunc(function: Callable[..., float]) -> Callable[..., np.ndarray]:
    return np.vectorize(function, otypes=[np.float64])


def _rint(x: np.ndarray) -> np.ndarray:
    return np.rint(x)


_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "fabs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": _np_erf,
    "erfc": _ufunc(math.erfc),
    "exp": np.exp,
    "exp10": lambda x: np.power(10.0, x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_cos": np.cos,
    "fast_exp": np.exp,
    "fast_log": np.log,
    "fast_log2": np.log2,
    "fast_sin": np.sin,
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "floor": np.floor,
    "fma": lambda x, y, z: x * y + z,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "lgamma": _ufunc(math.lgamma),
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "max": np.maximum,
    "min": np.minimum,
    "nearbyint": _rint,
    "pow": np.power,
    "powi": np.power,
    "rcbrt": lambda x: 1.0 / np.cbrt(x),
    "rint": _rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "tgamma": _ufunc(math.gamma),
    "trunc": np.trunc,
}

_installed = False


def install(builder: Builder) -> None:
    """Apply the repairs, `builder` doing the interpreter's operations. Only the first call has an effect."""
    global _installed
    if _installed:
        return
    _interp.interpreter_builder = builder
    _interp.interpreter_semantic = TritonSemantic(_interp.interpreter_builder)
    patch_tensor = _interp._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = _scalar
        tensor.__bool__ = _truth

    _interp._patch_lang_tensor = patch_lang_tensor
    _installed = True


def decorate_as_compiled() -> None:
    """Make `triton.jit` give JITFunction whatever TRITON_INTERPRET says: kernels can be compiled as well."""
    triton.knobs.runtime.__dict__["interpret"] = False
