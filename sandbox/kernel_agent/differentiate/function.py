"""The derivative of a plain Triton function: values in, a value out, for use inside the user's own kernels.

The passes are those of a kernel. A parameter stands in the graph as a load that needs no address, the
returned value as a store; so adjoints leave where a kernel would write gradients, and an upstream enters
where it would read one. Only the text differs.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib.util
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ..source import tree_nodes
from .ir.nodes import GradWrite, Node, Store, nodes_in, real
from .ir.refusal import Refusal
from .ir.spelling import gradient_name
from .ir.values import Arg, BlockPtr, Kernel, Ptr, dtype_text
from .read import syntax_check
from .read.normalise import Builder
from .reverse import forward_values, normalised, running_maxima
from .reverse.sweep import Reverse
from .write.emit import INDICES, WRITE, Emitter
from .write.helpers import scan_helpers
from .write.line_breaks import WIDTH, folded, indented, wrap

REMEDY = "Give grad() the stub that launches the kernel, or pass the loaded value as an argument."
MEMORY = (
    "load", "store", "atomic_", "make_block_ptr", "advance", "make_tensor", "load_tensor", "store_tensor",
)  # fmt: skip
PROGRAM = ("program_id", "num_programs")
SIZE = 64  # of one-dimensional blocks, where nothing is said about shapes
UNROLLED = 64  # iterations of one static loop

Shapes = dict[str, tuple[int, ...]]


class Math(Builder):
    """Interprets a plain function: parameters are values, memory is out of reach."""

    def trace(self, shapes: Shapes, dtype: str) -> tuple[Kernel, dict[str, Node], list[str]]:
        """The kernel that the function would be, its parameters' values, and names for what it returns."""
        g, source = self.g, self.source
        self.sizes: dict[int, Node] = {1: g.one}
        self.values: dict[str, Node] = {}
        self.fixed: dict[str, Any] = {}  # names and values that the text depends on
        for name, arg in self.args.items():
            constexpr = arg.kind == "constexpr"
            self.env[name] = self._param(arg) if constexpr else self.value(arg, shapes[name], dtype)
        done = self.block(source.body)
        returned = done.value if done is not None else None
        results = returned if isinstance(returned, tuple) else (returned,)
        if returned is None or not results:
            raise Refusal("return", f"`{source.name}` returns nothing to differentiate").at(source)
        names = self.result_names(len(results), isinstance(returned, tuple))
        for name, result in zip(names, results, strict=True):
            self.result(name, result, dtype)
        kernel = Kernel(source.name, g, {}, self.effects, self.args, self.tl, line=source.lineno)
        return kernel, self.values, names

    def value(self, arg: Arg, shape: tuple[int, ...], dtype: str) -> Node:
        """A parameter. Equal numbers in shapes are one size, named after the first axis that has it."""
        g = self.g
        for axis, size in enumerate(shape):
            if size not in self.sizes:
                attrs = {"name": f"{arg.name}.shape[{axis}]", "value": size, "global": True}
                self.sizes[size] = g.intern("constexpr", (), attrs, "int32", ())
        base = g.scratch(arg.name, dtype)
        base.active = arg.active
        dims = tuple(self.sizes[size] for size in shape)
        node = g.make("load", (base, g.const(0)), {"other": False}, f"${dtype}:{arg.name}", dims)
        node.hint = arg.name
        self.values[arg.name] = node
        return node

    def result_names(self, count: int, several: bool) -> list[str]:
        """Free names for results: `d_out` is a parameter in the derivative of a derivative."""
        stem = "out"
        while True:
            names = [f"{stem}_{i}" for i in range(count)] if several else [stem]
            if not {*names, *map(gradient_name, names)} & set(self.args):
                return names
            stem += "_"

    def result(self, name: str, value: Any, dtype: str) -> None:
        if isinstance(value, (tuple, Ptr, BlockPtr)):
            raise Refusal("return", "only values and tuples of values can be returned").at(self.source)
        g, node = self.g, self.node(value)
        attrs = {"name": name, "none": False, "elem": real(node.dtype) if node.is_float else dtype}
        base = g.intern("param", (), attrs, "pointer", ())
        base.active = True
        self.effects.append(Store(base, g.const(0), None, node, "store", g.top, self.source.lineno))

    def loop(self, node: ast.For) -> None:
        """A static loop over literals is unrolled, as Triton does: a function has no scratch for a tape."""
        lo, hi, step, call = self.range(node.iter)
        known = all(n.op == "const" or n.attrs.get("global") for n in (lo, hi, step)) and step.value
        steps = range(*map(self.number, (lo, hi, step))) if known else range(UNROLLED + 1)
        static = call.endswith("static_range") and len(steps) <= UNROLLED
        if not (static and isinstance(node.target, ast.Name)):
            super().loop(node)
            return
        for i in steps:
            self.env[node.target.id] = self.g.const(i)
            if self.block(node.body) is not None:
                raise Refusal("return in a loop", "a return inside a loop is not supported").at(node)

    def number(self, value: Any) -> Any:
        """A number that the text is written for: a call with another one must fail."""
        for node in nodes_in([value] if isinstance(value, Node) else []):
            if node.op == "constexpr":
                name = node.attrs["name"]
                if node.value is None:
                    remedy = f'Give it: grad({self.source.name}, {{"{name}": ...}}).'
                    raise Refusal("constexpr", f"the backward depends on the value of `{name}`", remedy)
                self.fixed[name] = node.value
        return super().number(value)

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Subscript):
            message = "a plain function launches nothing"
            raise Refusal("launch", message, "Mark the stub with @autodiff.").at(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        what = f"{self.tl}.{name}" if isinstance(node.func, ast.Attribute) else name
        if name.startswith(MEMORY):
            message = "a plain function takes and returns values, it reaches no memory"
            raise Refusal(what, message, REMEDY).at(node)
        if name in PROGRAM:
            raise Refusal(what, "a plain function does not know which program runs it", REMEDY).at(node)
        return super()._call(node)


class Printer(Emitter):
    """Prints effects as a function that returns what a kernel would write."""

    def __init__(self, kernel: Kernel, name: str, lines: list[str], results: list[str]) -> None:
        super().__init__(kernel, name, lines)
        self.ups = [gradient_name(n) for n in results]
        own = {gradient_name(n) for n in kernel.args} - {*kernel.args, *self.ups}
        self.reserved = {*self.reserved, *self.ups} - own
        self.returned: dict[str, str] = {}
        self.defaults: dict[str, str] = {}  # of constexpr parameters
        for node in [n for n in self.g.table.values() if n.op == "load" and not n.attrs.get("upstream")]:
            self.scope.names[node] = (node.args[0].attrs["name"], INDICES)

    def grad_write(self, write: GradWrite) -> None:
        self.returned[write.base.attrs["name"]] = self.expr(write.value)[0]

    def render(self, node: Node) -> tuple[str, int, int]:
        text, precedence, section = super().render(node)
        return text.replace(".dtype.element_ty", ".dtype"), precedence, section

    def _load(self, node: Node, sub: Any) -> str:
        return gradient_name(node.args[0].attrs["name"])

    def dtype(self, dtype: str) -> str:
        return dtype_text(dtype, self.tl).replace(".dtype.element_ty", ".dtype")

    def function(self, effects: list, wrt: list[str], values: dict[str, Node], notes: list[str]) -> str:
        """The text of the function; a gradient that nothing contributes to is zero."""
        g = self.g
        g.here = g.top
        written = {e.base.attrs["name"] for e in effects if isinstance(e, GradWrite)}
        for name in [n for n in wrt if n not in written]:
            node = values[name]
            zero = g.zeros(node.shape, "float64" if real(node.dtype) == "float64" else "float32")
            effects.append(GradWrite(node.args[0], g.const(0), None, zero, g.top, None))
        self.emit(effects, [])
        answer = f"return {', '.join(self.returned[name] for name in wrt)}"
        self.line(WRITE, answer)
        body = self._sections()
        body[body.index("# write gradients")] = "# gradients"
        return "\n".join(["@triton.jit", *self.head(), *notes, *indented(body)]) + "\n"

    def head(self) -> list[str]:
        """The forward's parameters, the upstream, and constexprs last, as in generated kernels."""
        constexprs = [n for n, arg in self.kernel.args.items() if arg.kind == "constexpr"]
        given = [n for n in self.kernel.args if n not in constexprs]
        constexprs.sort(key=lambda n: n in self.defaults)
        meta = [
            f"{n}: {self.tl}.constexpr" + (f" = {self.defaults[n]}" if n in self.defaults else "")
            for n in constexprs
        ]
        signature = [*given, *self.ups, *meta]
        line = f"def {self.name}({', '.join(signature)}):"
        if len(line) <= WIDTH:
            return [line]
        return [f"def {self.name}(", *("    " + part + "," for part in wrap(signature, WIDTH - 5)), "):"]


def differentiate(
    fn: Any, constants: dict[str, Any], wrt: Sequence[int | str] | None, shapes: Shapes | None, dtype: str
) -> Any:
    """The jit function of the adjoints of `fn`; see `api.grad`. Its text is its attribute `source`."""
    plain = inspect.unwrap(getattr(fn, "fn", fn))
    path = Path(inspect.getsourcefile(plain) or plain.__code__.co_filename)
    lines = path.read_text().splitlines()
    try:
        text = _text(plain, lines, constants, wrt, shapes, dtype)
    except (AssertionError, RecursionError) as error:
        reason = f"the passes of the differentiator contradict each other: {error or type(error).__name__}"
        raise Refusal("function", reason, "Split the function.", file=str(path)) from error
    except Refusal as refusal:
        raise refusal.at(None, str(path)) from None
    jitted = isinstance(fn, JITFunction), isinstance(fn, InterpretedFunction)
    return _loaded(text, f"{plain.__name__}_bwd", plain.__globals__, jitted[1] if any(jitted) else None)


def _text(
    plain: Any, lines: list[str], constants: dict, wrt: Sequence | None, shapes: Shapes | None, dtype: str
) -> str:
    """Source of the file that holds the derivative."""
    every = [n for n in tree_nodes(ast.parse("\n".join(lines))) if isinstance(n, ast.FunctionDef)]
    first = plain.__code__.co_firstlineno
    source = next(n for n in every if first in (n.lineno, *(d.lineno for d in n.decorator_list)))
    functions = {n.name: n for n in every}
    syntax_check.check(source)
    args = _arguments(source, plain, constants)
    chosen = _chosen(plain.__name__, args, wrt)
    for name in chosen:
        args[name].active = True
    sizes = _sizes(plain.__name__, args, shapes)
    module = ModuleType(plain.__module__)
    module.__dict__.update(plain.__globals__)
    builder = Math(source, module, functions, args)
    kernel, values, results = builder.trace(sizes, dtype)
    normalised.undivide(kernel, [])
    running_maxima.detach(kernel, [])
    reverse = Reverse(kernel, set()).run()
    for buffer in forward_values.Tape(reverse).run().buffers:
        why = (
            f"the backward needs `{buffer.carry}` of every step, and a function has no scratch to keep it in"
        )
        line = next(r.line for r in reverse.report if r.kind == "tape")
        raise Refusal("loop", why, f"Unroll it: {kernel.tl}.static_range over literals.", line)
    printer = Printer(kernel, f"{plain.__name__}_bwd", lines, results)
    texts = map(ast.unparse, source.args.defaults)
    printer.defaults = dict(zip(list(args)[len(args) - len(source.args.defaults) :], texts, strict=True))
    text = printer.function(reverse.effects, chosen, values, _assumed(builder, kernel, sizes))
    scans = [helper + "\n" for helper in scan_helpers(text)]
    return "".join([f"import triton\nimport triton.language as {kernel.tl}\n\n", *scans, "\n", text])


def _arguments(
    source: ast.FunctionDef, plain: Callable[..., Any], constants: dict[str, Any]
) -> dict[str, Arg]:
    """Parameters in order; a constexpr one takes its value from `constants` or its default."""
    a = source.args
    if a.vararg or a.kwarg or a.kwonlyargs:
        raise Refusal("parameters", "only plain parameters are supported").at(source)
    defaults = {
        n: p.default for n, p in inspect.signature(plain).parameters.items() if p.default is not p.empty
    }
    known = {**defaults, **constants}
    found = {}
    for one in a.args:
        constexpr = one.annotation is not None and ast.unparse(one.annotation).endswith("constexpr")
        value = known.get(one.arg) if constexpr else None
        found[one.arg] = Arg(one.arg, "constexpr" if constexpr else "value", getattr(value, "value", value))
    strange = set(constants) - {n for n, arg in found.items() if arg.kind == "constexpr"}
    if strange:
        raise ValueError(f"{source.name} has no constexpr parameter {', '.join(sorted(strange))}")
    return found


def _chosen(name: str, args: dict[str, Arg], wrt: Sequence[int | str] | None) -> list[str]:
    """The parameters that want gradients, in the order asked for."""
    values = [n for n, arg in args.items() if arg.kind == "value"]
    if wrt is None:
        return values
    names, chosen = list(args), []
    for one in wrt:
        known = isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(names)
        found = names[int(one)] if known else one
        if found not in values:
            raise ValueError(f"wrt: {name}({', '.join(names)}) has no value {one!r}")
        chosen.append(str(found))
    return chosen


def _sizes(name: str, args: dict[str, Arg], shapes: Shapes | None) -> Shapes:
    values = [n for n, arg in args.items() if arg.kind == "value"]
    if shapes is None:
        return dict.fromkeys(values, (SIZE,))
    if set(shapes) != set(values):
        raise ValueError(f"shapes: {name} takes the values {', '.join(values)}, not {', '.join(shapes)}")
    return {n: tuple(shape) for n, shape in shapes.items()}


def _assumed(builder: Math, kernel: Kernel, sizes: Shapes) -> list[str]:
    """What the function takes for granted, checked while it is compiled: other broadcasts need other sums."""
    shown = ", ".join(f"{name} {list(shape)}" for name, shape in sizes.items())
    about = f"- broadcasts as with {shown}; adjoints in float32, or in float64 where the forward is"
    out = ["    # assumptions and decisions", *(f"    # {part}" for part in folded(about, WIDTH - 6))]
    upstream = {gradient_name(s.base.attrs["name"]): s.value for s in kernel.effects if isinstance(s, Store)}
    for name, node in {**builder.values, **upstream}.items():
        out.append(f"    {kernel.tl}.static_assert(len({name}.shape) == {len(node.shape)})")
        for axis, dim in enumerate(node.shape):
            here, same = f"{name}.shape[{axis}]", dim.attrs.get("name", dim.attrs.get("value"))
            if same not in (None, here):
                out.append(f"    {kernel.tl}.static_assert({here} == {same})")
    out += [f"    {kernel.tl}.static_assert({name} == {value!r})" for name, value in builder.fixed.items()]
    return [*out, ""]


def _loaded(text: str, name: str, names: dict[str, Any], interpreted: bool | None) -> Any:
    """The function of a text, from a real file, as `triton.jit` asks; it sees what the forward sees."""
    file = folder_of_the_process() / f"{name}.py"
    file.write_text(text)
    loader, module = module_of(file)
    vars(module).update({n: v for n, v in names.items() if not n.startswith("__")})
    with _decorating(interpreted):
        loader.exec_module(module)
    made = getattr(module, name)
    made.source = text
    return made


def folder_of_the_process() -> Path:
    """A new folder for a generated file, which has to be there for as long as tracebacks and Triton may read
    it: it goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="kernel-agent-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def module_of(file: Path) -> tuple[Loader, ModuleType]:
    """A generated file as a module that has yet to run, and what runs it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    return spec.loader, importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def _decorating(interpreted: bool | None) -> Iterator[None]:
    """`triton.jit` gives functions of the forward's kind, whatever the process has chosen since."""
    knobs = vars(triton.knobs.runtime)
    before = dict(knobs)
    if interpreted is not None:
        knobs["interpret"] = interpreted
    try:
        yield
    finally:
        knobs.clear()
        knobs.update(before)
