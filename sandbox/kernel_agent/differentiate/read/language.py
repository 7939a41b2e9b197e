"""The operations of triton.language as graph nodes: what each call in a forward kernel means.

Everything composite (softmax, block pointers, keep_dims, swizzle) is expanded here, so that the rules see few
primitives. A function that is not in the table is refused by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ..ir.address_tables import CONSTRUCT, entry
from ..ir.graph import broadcast_shape, promote
from ..ir.nodes import INTS, Node, Store, is_float, real
from ..ir.refusal import Refusal
from ..ir.values import BlockPtr, DType, PointerTo, Poison, Ptr, PtrType, is_static
from . import functions
from .combining import associative_scan, reduce

if TYPE_CHECKING:
    from .normalise import Builder

DTYPES = {
    "fp8e4nv": "float8e4nv",
    "fp8e5": "float8e5",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    **{name: name for name in INTS},
}

FLOAT32 = torch.finfo(torch.float32)

NOT_DIFFERENTIABLE = {
    "inline_asm_elementwise": "inline assembly is opaque",
    "dot_scaled": "block-scaled dot products have no adjoint here",
    "sort": "sorting networks have no adjoint here",
    "topk": "selection networks have no adjoint here",
    "bitonic_merge": "sorting networks have no adjoint here",
    "histogram": "a histogram has no derivative",
    "atomic_xchg": "an exchange makes the result depend on the order of programs",
    "atomic_cas": "a lock makes the result depend on the order of programs",
    "atomic_max": "an atomic maximum makes the adjoint depend on the winning program",
    "atomic_min": "an atomic minimum makes the adjoint depend on the winning program",
    "make_tensor_descriptor": "TMA descriptors are not expanded to addresses",
    "load_tensor_descriptor": "TMA descriptors are not expanded to addresses",
    "store_tensor_descriptor": "TMA descriptors are not expanded to addresses",
    "device_assert": "a device assertion inside the kernel is a side effect",
}


def from_python(value: Any) -> Any:
    """A constant, type or function found in a module."""
    if type(value).__name__ == "dtype" and str(value) in DTYPES:
        return DType(DTYPES[str(value)])
    if type(value).__name__ == "constexpr":
        return value.value
    return value


def attribute(b: Builder, value: Any, name: str) -> Any:
    if isinstance(value, (Ptr, PtrType, BlockPtr)) and name in ("dtype", "type", "element_ty"):
        return DType(element(value.base)) if name == "element_ty" else PtrType(value.base)
    if isinstance(value, DType) and name in ("element_ty", "scalar"):
        return value
    if isinstance(value, Node):
        if name in ("dtype", "type"):
            return DType(value.dtype)
        if name == "shape":
            return tuple(value.shape)
        if name == "T":
            return permute(b, value, (1, 0))
        if name == "value":
            return value
    raise Refusal("attribute", f"`.{name}` is not supported on this value")


def element(base: Node) -> str:
    """The element type of a pointer; symbolic for floats, so that the backward fits every precision."""
    elem = base.attrs["elem"]
    if base.op == "entry":  # the kernel names the type itself
        return elem
    return f"${elem}:{base.attrs['name']}" if is_float(elem) else elem


def method(b: Builder, owner: Any, name: str, args: list, kw: dict) -> Any:
    if isinstance(owner, (Ptr, BlockPtr)):
        if name == "to":
            raise Refusal("pointer cast", "casting a pointer changes what its elements are")
        if name == "advance":
            return advance(b, owner, *args, **kw)
        raise Refusal(f".{name}", "this method of a pointer is not supported", "Load first.")
    if name == "to":
        return cast(b, owner, *args, **kw)
    if name in TABLE:
        return TABLE[name](b, owner, *args, **kw)
    if functions.known(name):
        return functions.call(b, name, f"{b.tl}.{name}", [b.node(v) for v in (owner, *args)])
    raise Refusal(f".{name}", NOT_DIFFERENTIABLE.get(name, f"`.{name}` has no adjoint here"))


def at_compile_time(function: Callable[..., Any], text: str, args: list, kw: dict) -> Any:
    """What a function of numbers and types computes when the kernel is compiled. A tensor's own type is given
    as what it is now; where it comes back, it stays the tensor's own, but for float32, in which calls with
    narrower types may be meant to compute too."""
    values = [*args, *kw.values()]
    if any(isinstance(value, (Node, Ptr, BlockPtr)) for value in values):
        raise Refusal(text, f"`{text}` is asked for what is not known before a launch")

    def now(kind: DType) -> str:
        return kind.name.removeprefix("$").partition(":")[0]

    def as_triton(value: Any) -> Any:
        return getattr(tl, now(value)) if isinstance(value, DType) else value

    made = from_python(function(*map(as_triton, args), **{key: as_triton(v) for key, v in kw.items()}))
    owns = [v for v in values if isinstance(v, DType) and v.name.startswith("$")]
    same = [own for own in owns if isinstance(made, DType) and now(own) == made.name != "float32"]
    return same[0] if same else made


def call(b: Builder, function: Any, text: str, args: list, kw: dict) -> Any:
    if isinstance(function, DType):
        return cast(b, args[0], function)
    name = getattr(function, "__name__", str(function))
    if name == "constexpr":  # what is known when it is compiled, and what is not, alike
        return args[0]
    if name in USER_RULES:
        return user_call(b, name, text, args)
    if function in (min, max):
        op = "minimum" if function is min else "maximum"
        return functools.reduce(lambda x, y: b.g.make(op, (b.node(x), b.node(y))), args)
    if function in (float, int, bool, len, abs) and not any(isinstance(a, Node) for a in args):
        return function(*args)
    if function is float and isinstance(args[0], Node):
        return cast(b, args[0], DType("float32"))
    if function is abs:
        return functions.call(b, "abs", f"{b.tl}.abs", [b.node(args[0])])
    if name in NOT_DIFFERENTIABLE:
        raise Refusal(text, NOT_DIFFERENTIABLE[name])
    if name == "next_power_of_2":
        value = b.node(args[0])
        b.number(value)
        return b.g.make("next_power_of_2", (value,), {"text": text}, "int32", ())
    try:
        if name in TABLE:
            return TABLE[name](b, *args, **kw)
        if functions.known(name):
            given = inspect.signature(getattr(function, "fn", function)).bind(*args, **kw).arguments
            return functions.call(b, name, text, [b.node(a) for a in given.values()])
    except TypeError as error:
        raise Refusal(
            text, f"called with arguments that are not understood ({error})", "Pass what Triton takes."
        ) from None
    if isinstance(function, FunctionType) and not function.__module__.startswith("triton."):
        return at_compile_time(function, text, args, kw)
    raise Refusal(text, f"`{text}` has no adjoint here")


# memory


def program_id(b: Builder, axis: Any) -> Node:
    return b.g.pid(int(b.number(axis)))


def num_programs(b: Builder, axis: Any) -> Node:
    return b.g.npid(int(b.number(axis)))


def _mask(b: Builder, mask: Any) -> Node | None:
    if mask is None or mask is True:
        return None
    return b.node(mask)


def load(
    b: Builder,
    ptr: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: Any = "",
    **_: Any,
) -> Node:
    if isinstance(ptr, BlockPtr):
        ptr, mask, other = _expand_block(b, ptr, boundary_check, padding_option)
    if not isinstance(ptr, Ptr):
        raise Refusal("load", "the address is not based on a pointer argument")
    g, base = b.g, ptr.base
    mask = _mask(b, mask)
    args = [base, ptr.offset]
    shape = ptr.offset.shape
    if mask is not None:
        shape = max(shape, mask.shape, key=len)
        if other is None:  # what the forward leaves undefined is 0 here, so that it cannot be a NaN
            other = 0.0 if is_float(element(base)) else 0
        args += [mask, b.node(other)]
    held = _just_stored(b, base, ptr.offset, mask)
    if held is not None:
        value = g.cast(held, element(base))
        return value if mask is None else g.where(mask, value, args[-1])
    node = g.make("load", args, {"other": mask is not None}, element(base), shape)
    b.loaded.append((base, ptr.offset, mask, g.here))
    node.active = (base.active and node.is_float) or (mask is not None and args[-1].active)
    return node


def _just_stored(b: Builder, base: Node, offset: Node, mask: Node | None) -> Node | None:
    """What the kernel itself has stored where it loads, if it has."""
    for store in reversed(b.stored):
        if store.base is not base or store.offset is not offset or store.mask is not mask:
            continue
        if store.kind != "store" or b.g.here.excludes(store.region):
            continue
        if b.g.here.inside(store.region):
            return store.value
        name = base.attrs["name"]
        message = f"`{name}` is read after a branch or a loop has written it there (line {store.line})"
        raise Refusal("in-place access", message, "Keep the value in a variable, and store it at the end.")
    return None


def store(b: Builder, ptr: Any, value: Any, mask: Any = None, boundary_check: Any = (), **_: Any) -> None:
    _write(b, ptr, value, mask, boundary_check, "store")


def atomic_add(b: Builder, ptr: Any, value: Any, mask: Any = None, **_: Any) -> Poison:
    _write(b, ptr, value, mask, (), "atomic_add")
    return NO_VALUE


NO_VALUE = Poison("what an atomic returns depends on the order of programs", "atomic result")


def _write(b: Builder, ptr: Any, value: Any, mask: Any, boundary_check: Any, kind: str) -> None:
    if isinstance(ptr, BlockPtr):
        ptr, mask, _ = _expand_block(b, ptr, boundary_check, "")
    if not isinstance(ptr, Ptr):
        raise Refusal(kind, "the address is not based on a pointer argument")
    if ptr.base.op == "entry" and kind == "atomic_add":
        raise Refusal(
            "table of pointers",
            "what is added to through a table keeps a gradient of its own",
            "Store through the table, or pass each buffer as an argument.",
        )
    node = b.node(value)
    mask = _mask(b, mask)
    if node.shape != ptr.offset.shape:
        node = b.g.broadcast(node, ptr.offset.shape)
    if kind == "atomic_add":
        b.added.add(ptr.base.attrs["name"])
    effect = Store(ptr.base, ptr.offset, mask, node, kind, b.g.here, b.g.line)
    b.stored.append(effect)
    b.effects.append(effect)


def make_block_ptr(
    b: Builder, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any = ()
) -> BlockPtr:
    if not isinstance(base, Ptr):
        raise Refusal("make_block_ptr", "the address is not based on a pointer argument")
    return BlockPtr(base.base, base.offset, *map(b.dims, (shape, strides, offsets, block_shape)))


def advance(b: Builder, ptr: Any, offsets: Any) -> BlockPtr:
    if not isinstance(ptr, BlockPtr):
        raise Refusal("advance", "only a block pointer can be advanced", "Add the offset to the pointer.")
    moved = zip(ptr.offsets, b.dims(offsets), strict=True)
    return replace(ptr, offsets=tuple(b.g.add(old, step) for old, step in moved))


def _expand_block(
    b: Builder, ptr: BlockPtr, boundary_check: Any, padding: Any
) -> tuple[Ptr, Node | None, Node | None]:
    """A block pointer as offsets and a mask."""
    g, rank = b.g, len(ptr.block)
    checked = [int(b.number(axis)) for axis in (boundary_check or ())]
    offset: Node = ptr.start
    mask: Node | None = None
    for axis in range(rank):
        index = g.along(g.add(ptr.offsets[axis], arange(b, 0, ptr.block[axis])), axis, rank)
        offset = g.add(offset, g.mul(index, ptr.strides[axis]))
        if axis in checked:
            inside = g.compare("<", index, ptr.shape[axis])
            mask = g.both(mask, g.both(g.compare(">=", index, g.const(0)), inside))
    if mask is None:
        return Ptr(ptr.base, offset), None, None
    if mask.shape != offset.shape:
        mask = g.broadcast(mask, offset.shape)
    return Ptr(ptr.base, offset), mask, g.number(float("nan") if padding == "nan" else 0.0)


# shapes


def arange(b: Builder, start: Any, end: Any) -> Node:
    lo, hi = b.node(start), b.node(end)
    lanes = b.g.make("arange", (lo, hi), {}, "int32", (b.g.sub(hi, lo),))
    if b.spread is None or hi.op != "constexpr" or hi.attrs["name"] != b.spread[0]:
        return lanes
    return b.g.add(b.g.mul(b.g.pid(b.spread[1]), hi), lanes)


def _dtype(value: Any, default: str = "float32") -> str:
    found = DType(default) if value is None else from_python(value)
    if not isinstance(found, DType):
        raise Refusal("dtype", f"`{value}` is not a type that is understood")
    return found.name


def full(b: Builder, shape: Any, value: Any, dtype: Any) -> Node:
    node, name = b.node(value), _dtype(dtype)
    dims = b.dims(shape)
    if node.op == "const":
        number = float(node.value) if is_float(name) else node.value
        return b.g.make("full", (b.g.const(number),), {}, name, dims)
    return b.g.broadcast(b.g.cast(node, name), dims)


def zeros(b: Builder, shape: Any, dtype: Any) -> Node:
    return full(b, shape, 0.0 if is_float(_dtype(dtype)) else 0, dtype)


def zeros_like(b: Builder, value: Any) -> Node:
    node = b.node(value)
    return b.g.zeros(node.shape, node.dtype)


def cast(b: Builder, value: Any, dtype: Any, bitcast: Any = False, **_: Any) -> Any:
    if bitcast is True and not isinstance(dtype, PointerTo):
        raise Refusal("bitcast", "reinterpreting bits has no derivative")
    if isinstance(value, (Ptr, BlockPtr)):
        raise Refusal("pointer cast", "casting a pointer changes what its elements are")
    if isinstance(dtype, PointerTo):
        return pointer(b, value, dtype.element)
    return b.g.cast(b.node(value), _dtype(dtype))


def pointer(b: Builder, value: Any, element: str) -> Ptr:
    """The pointer that an address from a table is cast to."""
    node = b.node(value)
    if node.op != "load" or node.shape or len(node.args) != 2 or node.args[0].op != "param":
        raise Refusal(
            CONSTRUCT,
            "an address must be one element of a table that the stub passes, loaded as it is",
            "Write tl.load(table + index).to(tl.pointer_type(...)), and add offsets to the pointer.",
        )
    table, index = node.args
    name = table.attrs["name"]
    behind = b.args[name].behind
    if behind is None:
        raise Refusal(
            CONSTRUCT,
            f"the addresses in `{name}` are not known: their tensors' data_ptr() is not called in the stub",
            "Make the table in the stub, from tensor.data_ptr() of every tensor, as torch.int64.",
        )
    if not is_float(element) or real(element) != behind.dtype:
        raise Refusal(
            CONSTRUCT,
            f"`{name}` points to tensors of {behind.dtype}, not of {real(element)}",
            "Name the type that the tensors have.",
        )
    base = entry(b.g, table, index, element, behind.active)
    b.entries.setdefault(name, []).append(base)
    return Ptr(base, b.g.const(0))


def pointer_type(b: Builder, element: Any, *_: Any, **__: Any) -> PointerTo:
    return PointerTo(_dtype(element))


def expand_dims(b: Builder, value: Any, axis: Any) -> Node:
    node = b.node(value)
    for one in sorted(axis if isinstance(axis, tuple) else (b.number(axis),)):
        node = b.g.expand(node, one if one >= 0 else one + len(node.shape) + 1)
    return node


def _given(numbers: tuple) -> tuple:
    """Sizes or axes that are passed one by one, or as a tuple."""
    return numbers[0] if len(numbers) == 1 and isinstance(numbers[0], tuple) else numbers


def broadcast_to(b: Builder, value: Any, *shape: Any) -> Node:
    dims = b.dims(_given(shape))
    return b.g.broadcast(b.node(value), dims)


def broadcast(b: Builder, x: Any, y: Any) -> tuple[Node, Node]:
    x, y = b.node(x), b.node(y)
    shape = broadcast_shape(b.g, [x.shape, y.shape])
    return b.g.broadcast(x, shape), b.g.broadcast(y, shape)


def permute(b: Builder, value: Any, *order: Any) -> Node:
    node = b.node(value)
    axes = tuple(int(b.number(a)) % len(node.shape) for a in _given(order))
    return b.g.make("permute", (node,), {"order": axes}, node.dtype, tuple(node.shape[a] for a in axes))


def trans(b: Builder, value: Any, *order: Any) -> Node:
    rank = len(b.node(value).shape)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    return permute(b, value, *(order or (swap,)))


def reshape(b: Builder, value: Any, *shape: Any, **_: Any) -> Node:
    dims, node = b.dims(_given(shape)), b.node(value)
    return b.g.make("reshape", (node,), {}, node.dtype, dims)


def ravel(b: Builder, value: Any, **_: Any) -> Node:
    node = b.node(value)
    return reshape(b, node, (functools.reduce(b.g.mul, node.shape),))


def flip(b: Builder, value: Any, dim: Any = None) -> Node:
    node = b.node(value)
    axis = (len(node.shape) - 1) if dim is None else int(b.number(dim)) % len(node.shape)
    return b.g.make("flip", (node,), {"axis": axis}, node.dtype, node.shape)


def join(b: Builder, x: Any, y: Any) -> Node:
    x, y = broadcast(b, x, y)
    return b.g.make("join", (x, y), {}, promote((x, y)), (*x.shape, b.g.const(2)))


def split(b: Builder, value: Any) -> tuple[Node, Node]:
    node = b.node(value)
    shape = node.shape[:-1]
    return tuple(b.g.make("split", (node,), {"index": i}, node.dtype, shape) for i in (0, 1))  # type: ignore[return-value]


def interleave(b: Builder, x: Any, y: Any) -> Node:
    joined = join(b, x, y)
    *lead, last, two = joined.shape
    return reshape(b, joined, (*lead, b.g.mul(last, two)))


# arithmetic


def _binary(op: str) -> Callable:
    def make(b: Builder, x: Any, y: Any, **_: Any) -> Node:
        return b.g.make(op, (b.node(x), b.node(y)))

    return make


def _divide(b: Builder, x: Any, y: Any, *_: Any, **__: Any) -> Node:
    return b.g.div(b.node(x), b.node(y))


def cdiv(b: Builder, x: Any, div: Any) -> Node:
    x, y = b.node(x), b.node(div)
    return b.g.make("cdiv", (x, y))


def where(b: Builder, condition: Any, x: Any, y: Any) -> Node:
    cond, x, y = b.node(condition), b.node(x), b.node(y)
    return b.g.make("where", (cond, x, y), {}, promote((x, y)))


def _larger_or_smaller(op: str) -> Callable:
    def make(b: Builder, x: Any, y: Any, **_: Any) -> Node:
        return _of_tensors(b, op, x, y)

    return make


def clamp(b: Builder, x: Any, min: Any, max: Any, **_: Any) -> Node:
    return _of_tensors(b, "clamp", x, min, max)


def _of_tensors(b: Builder, op: str, *values: Any) -> Node:
    """An operation that makes tensors of Python numbers first: of float64, where float32 has no such normal
    number."""
    args = [b.node(value) for value in values]
    numbers = [b.g.concrete(arg) for arg in args if arg.op in ("const", "constexpr") and arg.is_float]
    sizes = [abs(number) for number in numbers if number is not None]
    wide = any(0 < size < FLOAT32.tiny or FLOAT32.max < size < math.inf for size in sizes)
    return b.g.make(op, args, dtype="float64" if wide else None)


def fma(b: Builder, x: Any, y: Any, z: Any) -> Node:
    return b.g.add(b.g.mul(b.node(x), b.node(y)), b.node(z))


def dot(
    b: Builder,
    input: Any,
    other: Any,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = None,
) -> Node:
    x, y, g = b.node(input), b.node(other), b.g
    if len(x.shape) != len(y.shape) or len(x.shape) not in (2, 3):
        raise Refusal("dot", "a dot product of blocks of rank 2 or 3 is expected")
    if input_precision is None and allow_tf32 is not None:
        input_precision = "tf32" if b.number(allow_tf32) else "ieee"
    precision = input_precision if input_precision is None else str(b.number(input_precision))
    dtype = _dtype(out_dtype, "float64" if "float64" in (x.dtype, y.dtype) else "float32")
    shape = (*x.shape[:-1], y.shape[-1])
    g.contracted.add(x.shape[-1])
    g.meet(x.shape[-1:], y.shape[-2:-1])
    out = g.make("dot", (x, y), {"precision": precision}, dtype, shape)
    if acc is not None:
        out = g.make("add", (b.node(acc), out), {}, dtype, shape)
    return out


# reductions and scans


def _axes(b: Builder, node: Node, axis: Any) -> list[int]:
    if axis is None:
        return list(range(len(node.shape)))[::-1]
    return [int(b.number(axis)) % len(node.shape)]


def _reduction(fn: str) -> Callable:
    def make(b: Builder, input: Any, axis: Any = None, keep_dims: Any = False, **kw: Any) -> Any:
        node, g = b.node(input), b.g
        if kw.get("return_indices"):
            return make(b, node, axis, keep_dims), _index(b, fn, node, axis, keep_dims)
        out = node if node.is_float or node.dtype != "int1" else g.cast(node, "int32")
        for one in _axes(b, node, axis):
            out = g.reduce(fn, out, one, bool(b.number(keep_dims)), _dtype(kw.get("dtype"), out.dtype))
        return out

    return make


def _index(b: Builder, fn: str, node: Node, axis: Any, keep_dims: Any) -> Node:
    (one,) = _axes(b, node, axis)
    shape = (*node.shape[:one], *node.shape[one + 1 :])
    out = b.g.make("argreduce", (node,), {"fn": fn, "axis": one}, "int32", shape)
    return b.g.expand(out, one) if b.number(keep_dims) else out


def _argreduction(fn: str) -> Callable:
    def make(b: Builder, input: Any, axis: Any, tie_break_left: Any = True, keep_dims: Any = False) -> Node:
        return _index(b, fn, b.node(input), axis, keep_dims)

    return make


def softmax(b: Builder, x: Any, dim: Any = None, keep_dims: Any = False, ieee_rounding: Any = False) -> Node:
    node, g = b.node(x), b.g
    axis = 0 if dim is None else int(b.number(dim)) % len(node.shape)
    # Without it a block of rank 2 is only right where Triton's own broadcast makes it so.
    keep = bool(b.number(keep_dims))
    e = g.call("exp", g.sub(node, g.reduce("max", node, axis, keep)))
    return g.div(e, g.reduce("sum", e, axis, keep))


def _scan(fn: str) -> Callable:
    def make(b: Builder, input: Any, axis: Any = 0, reverse: Any = False, **_: Any) -> Node:
        node = b.node(input)
        one = int(b.number(axis)) % len(node.shape)
        attrs = {"fn": fn, "axis": one, "reverse": bool(b.number(reverse))}
        return b.g.make("scan", (node,), attrs, node.dtype, node.shape)

    return make


# random numbers


def _random(fn: str) -> Callable:
    def make(b: Builder, seed: Any, offset: Any, n_rounds: Any = None) -> Node:
        seed, offset = b.node(seed), b.node(offset)
        attrs = {"fn": fn, "rounds": None if n_rounds is None else b.number(n_rounds)}
        dtype = "int32" if fn == "randint" else "float32"
        return b.g.make("random", (seed, offset), attrs, dtype, offset.shape)

    return make


# hints


def _first(b: Builder, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _nothing(b: Builder, *_: Any, **__: Any) -> None:
    return None


def swizzle2d(b: Builder, i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any) -> tuple[Node, Node]:
    g = b.g
    i, j, rows, cols, group = (b.node(v) for v in (i, j, size_i, size_j, size_g))
    flat = g.add(g.mul(i, cols), j)
    per_group = g.mul(group, cols)
    first = g.mul(g.make("floordiv", (flat, per_group)), group)
    height = g.make("minimum", (g.sub(rows, first), group))
    local = g.make("mod", (flat, per_group))
    return g.add(first, g.make("mod", (local, height))), g.make("floordiv", (local, height))


def gather(b: Builder, src: Any, index: Any, axis: Any) -> Node:
    x, at = b.node(src), b.node(index)
    one = int(b.number(axis)) % len(x.shape)
    return b.g.make("gather", (x, at), {"axis": one}, x.dtype, at.shape)


USER_RULES: dict[str, Callable] = {}


def user_call(b: Builder, name: str, text: str, args: list) -> Node:
    """An operation with a registered rule: elementwise in its blocks, called again with the same numbers."""
    blocks = [b.node(a) for a in args if isinstance(a, Node) and not is_static(a)]
    shown = ", ".join("{}" if isinstance(a, Node) and not is_static(a) else repr(_plain(a)) for a in args)
    return b.g.make("user", blocks, {"fn": name, "text": f"{text}({shown})"}, promote(blocks))


def _plain(value: Any) -> Any:
    return value.attrs.get("name", value.attrs.get("value")) if isinstance(value, Node) else value


OWN = (
    program_id, num_programs, load, store, atomic_add, make_block_ptr, advance, arange, full, zeros,
    zeros_like, cast, pointer_type, expand_dims, broadcast_to, broadcast, permute, trans, reshape, ravel,
    flip, join, split, interleave, cdiv, where, clamp, fma, dot, softmax, associative_scan, reduce, swizzle2d, gather,
)  # fmt: skip
TABLE: dict[str, Callable] = {
    **{function.__name__: function for function in OWN},
    "view": reshape,
    **{op: _binary(op) for op in ("add", "sub", "mul")},
    **dict.fromkeys(("maximum", "fmax"), _larger_or_smaller("maximum")),
    **dict.fromkeys(("minimum", "fmin"), _larger_or_smaller("minimum")),
    **dict.fromkeys(("fdiv", "div_rn", "truediv"), _divide),
    **{fn: _reduction(fn) for fn in ("sum", "max", "min")},
    **{f"arg{fn}": _argreduction(fn) for fn in ("max", "min")},
    **{f"cum{fn}": _scan(fn) for fn in ("sum", "prod")},
    **{fn: _random(fn) for fn in ("rand", "randn", "randint")},
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), _first),
    **dict.fromkeys(("assume", "static_print", "device_print", "debug_barrier", "static_assert"), _nothing),
}
