"""Loads a forward file or a pair, and runs its stub: interpreted on the CPU, or on a GPU.

    fwd = load(path)                                    raises errors.Unusable with kind, line and remedy
    args, kwargs = draw.make_inputs(fwd, dims, seed)
    with launch_intercept(lambda launch: launch.run()): optional: see every kernel launch
        outputs = fwd.call(args, kwargs)

Everything that runs the user's code goes through `fwd.active()` (`call` and `draw` do it): inside it,
questions about a GPU are answered for the target (devices.py). `fwd.stub` is the plain function for those who
need it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import linecache
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import compat, devices, handwritten, intact, launches
from .autodiff import MisusedMark
from .errors import Unusable, wrap
from .handwritten import HandWritten
from .launches import Launch, launch_intercept
from .source import autodiff_names, parse, read, tree_nodes

__all__ = ["Forward", "Launch", "Shape", "launch_intercept", "load"]

_UNREADABLE = (
    "only what is installed can be read, and modules that the file imports by name from its folder, its "
    "package, a package that was installed with `pip install -e`, or a folder of --path DIR"
)
_USAGE = (
    "decorate the host function with @autodiff(inputs_require_grad=(0, 1)): positions of inputs in its "
    "signature"
)


@dataclass(frozen=True)
class Shape:
    """One entry of SWEEP: dimensions for make_args, and whether the verdict must cover it."""

    dims: dict[str, Any]
    required: bool


@dataclass
class Forward:
    """A loaded file. All names are the user's own."""

    path: str
    source: str
    tree: ast.Module
    module: types.ModuleType
    stub: Callable[..., Any]
    stub_name: str
    stub_line: int
    params: tuple[inspect.Parameter, ...]
    grads: tuple[str, ...]  # inputs that want gradients, in signature order
    kernels: dict[str, Any]  # module-level kernels by name, launchers included
    sweep: list[Shape]
    sweep_cpu: list[Shape] | None
    make_args: Callable[..., Any]
    reference: Callable[..., Any] | None
    flops: Callable[..., Any] | None
    setup: Callable[..., Any] | None
    dtype: torch.dtype  # default of make_args
    dtype_dims: frozenset[str]  # entries of SWEEP's dims that are dtypes
    entry_name: str  # `<stub>_autograd`; of a module without a marker maybe the stub itself
    mode: str
    device: str
    target: devices.Target
    answers: devices.Answers
    functions: tuple[str, ...] = ()  # of a module that people wrote themselves: all that could be checked
    borrowed: bool = False  # make_args is the module's, and there are several that it may be meant for
    hoisted: dict[str, str] | None = None  # launchers that host functions make: differentiate.read.launchers
    adopted: Any = None  # functions of other modules that are read as this file's: differentiate.read.adopted
    _set_up: bool = field(default=False, repr=False)

    @property
    def signature(self) -> inspect.Signature:
        return inspect.Signature(self.params)

    @property
    def device_answers(self) -> list[dict[str, Any]]:
        """What the file asked about the device so far, and what it was told: line, asked, answer."""
        return self.answers.given

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Runs the user's code: launches go where `mode` says, questions about the device are answered."""
        launches.set_mode(self.mode)
        answering = contextlib.nullcontext() if self.mode == "cuda" else devices.answering(self.answers)
        with (
            devices.NoteDetached(),
            devices.noting_marks(),
            answering,
        ):  # the answers must see the user's frame first
            yield

    def as_written(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """Dims for the file's own functions: a dtype in SWEEP travels as its name."""
        return {key: _dtype_called(value) if key in self.dtype_dims else value for key, value in dims.items()}

    def call(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """The stub's return value, as it returned it. Raises Unusable("stub_raised"). Gradients that the stub
        switches off for good (`torch.set_grad_enabled(False)`) are on again behind it."""
        enabled = torch.is_grad_enabled()
        try:
            with self.active():
                return self.stub(*args, **(kwargs or {}))
        except (Exception, SystemExit) as exc:
            error = wrap("stub_raised", f"{self.stub_name}() raised ", exc, [self.path])
            if self.borrowed and error.remedy is None:
                error.remedy = f"add make_args_{self.stub_name}, if make_args is not meant for it"
            raise error from exc
        finally:
            torch.set_grad_enabled(enabled)

    def ensure_setup(self) -> None:
        """Call the file's setup() before its first use, once."""
        if self.setup is None or self._set_up:
            return
        self._set_up = True
        try:
            with self.active():
                self.setup()
        except Exception as exc:
            raise wrap("make_args_raised", "setup() raised ", exc, [self.path]) from exc


def load(
    path: str | Path,
    mode: str = "interpret",
    target: str = "sm_90",
    device: str = "cpu",
    processors: int | None = None,
    function: str | None = None,
) -> Forward:
    """Execute the file and find everything that a forward file must have. Raises Unusable.

    `mode` is "interpret" (kernels run on the CPU), "compile" (launches are recorded, never run) or "cuda".
    `processors` is what the file hears of the target's number of multiprocessors, where there is no GPU;
    None: the truth about its card. `function` is what of the file is meant; None: the stub, or the first of
    a module's autograd functions that has arguments.
    """
    file = str(Path(path).resolve())
    source = read(file)
    tree = parse(source, file)
    intact.require_no_judge(tree, file)
    whole = not handwritten.has_marker(source) and bool(handwritten.functions_of(tree))
    owns, stubs, names = _meant(tree, file, whole, function)
    answering = replace(devices.Target.parse(target), processors=processors)
    answers = devices.Answers(str(Path(file).parent), answering)
    module = _execute(file, source, mode, answers, whole)
    definition: Any
    decorator: ast.Call | None = None
    if owns:
        definition = next((one for one in owns if _has_arguments(module, one)), owns[0])
    else:
        definition, decorator = stubs[0]
    own = _Own(module, definition, len(names) > 1)
    stub = _called(module, definition)
    if not callable(stub):
        raise Unusable(
            "no_stub", f"{definition.name} is not a function once the file has run", file, _line(definition)
        )
    params = _parameters(module, stub, definition)
    make_args = _make_args(own, file)
    sweep_name = own.called("SWEEP")
    sweep = _sweep(module, tree, file, sweep_name)
    on_cpu = own.called("SWEEP_CPU") if sweep_name == "SWEEP" else f"SWEEP_CPU{sweep_name[len('SWEEP') :]}"
    return Forward(
        path=file,
        source=source,
        tree=tree,
        module=module,
        stub=stub,
        stub_name=definition.name,
        stub_line=_line(definition),
        params=params,
        grads=_grads(decorator, module, params, file) if decorator is not None else definition.grads,
        kernels=_kernels(module, file),
        sweep=sweep,
        sweep_cpu=_sweep(module, tree, file, on_cpu) if hasattr(module, on_cpu) else None,
        make_args=make_args,
        reference=_function(module, own.of_its_own("reference")),
        flops=_function(module, own.of_its_own("flops")),
        setup=_function(module, "setup"),
        dtype=default_dtype(make_args, [shape.dims for shape in sweep]),
        dtype_dims=_dtype_dims(module, sweep_name, on_cpu),
        entry_name=_entry_name(module, definition.name, whole),
        mode=mode,
        device=device,
        target=answers.target,
        answers=answers,
        functions=names if whole else (),
        borrowed=own.several and own.called("make_args") == "make_args",
    )


def _meant(
    tree: ast.Module, file: str, whole: bool, function: str | None
) -> tuple[list[HandWritten], list[tuple[ast.FunctionDef, ast.Call]], tuple[str, ...]]:
    """What may be the stub: functions of a module that people wrote themselves, or what is decorated; and the
    names of all of them, whichever `function` is."""
    owns = handwritten.all_of(tree) if whole and not _decorated(tree) else []
    stubs = [] if owns else _find_stubs(tree, file, several=whole)
    for _, mark in stubs:
        _positions_argument(mark, file)  # a bad mark is told before the file runs into it
    names = tuple(one.name for one in owns) or tuple(stub.name for stub, _ in stubs)
    if function is not None:
        owns = [handwritten.named(owns, function, file)] if owns else []
        stubs = [(stub, mark) for stub, mark in stubs if stub.name == function]
        if not owns and not stubs:
            raise handwritten.no_such(function, list(names), file)
    return owns, stubs, names


def _make_args(own: _Own, file: str) -> Callable[..., Any]:
    found = _function(own.module, own.called("make_args"))
    if found is not None:
        return found
    name = own.definition.name
    missing = f"make_args_{name}" if own.several else "make_args"
    raise Unusable(
        "make_args_missing",
        f"{'not checked: no make_args for it: ' if own.several else ''}the file has no function "
        f"{missing}(dims, device=..., dtype=...)",
        file,
        remedy=f"add {missing}, which returns the arguments of {name} for one entry of SWEEP",
    )


@dataclass(frozen=True)
class _Own:
    """Where a module has several functions to be checked, names that belong to one of them."""

    module: types.ModuleType
    definition: ast.FunctionDef | HandWritten
    several: bool

    def called(self, name: str) -> str:
        """`make_args_silu`, where there is one, else `make_args`."""
        one = self.definition
        ends = handwritten.called_as(one) if isinstance(one, HandWritten) else [one.name]
        return next((f"{name}_{end}" for end in ends if hasattr(self.module, f"{name}_{end}")), name)

    def of_its_own(self, name: str) -> str:
        """The same of what cannot be meant for more than one of several."""
        found = self.called(name)
        return found if found != name or not self.several else f"{name}_{self.definition.name}"


def _has_arguments(module: types.ModuleType, one: HandWritten) -> bool:
    own = _Own(module, one, True)
    return hasattr(module, own.called("make_args")) and hasattr(module, own.called("SWEEP"))


def is_decorated(fwd: Forward) -> bool:
    """Whether positions say which inputs want gradients; else a backward that people wrote does."""
    return _decorated(fwd.tree)


def _decorated(tree: ast.Module) -> bool:
    names = autodiff_names(tree)
    decorators = [
        d for node in tree_nodes(tree) if isinstance(node, ast.FunctionDef) for d in node.decorator_list
    ]
    callees = [d.func if isinstance(d, ast.Call) else d for d in decorators]
    return any((c.id if isinstance(c, ast.Name) else getattr(c, "attr", None)) in names for c in callees)


def _line(definition: ast.FunctionDef | HandWritten) -> int:
    return definition.line if isinstance(definition, HandWritten) else definition.lineno


def _called(module: types.ModuleType, definition: ast.FunctionDef | HandWritten) -> Any:
    """The function that is called; of an autograd function itself its `apply`."""
    value = getattr(module, definition.name, None)
    return getattr(value, "apply", value) if isinstance(value, type) else value


def _parameters(
    module: types.ModuleType, stub: Callable[..., Any], definition: ast.FunctionDef | HandWritten
) -> tuple[inspect.Parameter, ...]:
    if isinstance(definition, HandWritten) and definition.call is None:
        owner = getattr(module, definition.function.name)
        known = inspect.signature(owner.forward).parameters
        names = handwritten.parameters_of(definition.function)
        if set(names) <= known.keys():
            return tuple(known[name] for name in names)
        return _written(module, handwritten.forward_of(definition.function), names)
    return tuple(inspect.signature(inspect.unwrap(stub)).parameters.values())


def _written(
    module: types.ModuleType, forward: ast.FunctionDef, names: list[str]
) -> tuple[inspect.Parameter, ...]:
    """Parameters as they are written: a decorator around the forward that does not use functools.wraps hides
    them."""
    positional = [*forward.args.posonlyargs, *forward.args.args]
    given = dict(zip(reversed([a.arg for a in positional]), reversed(forward.args.defaults), strict=False))
    return tuple(
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=_evaluated(module, given[name]) if name in given else inspect.Parameter.empty,
        )
        for name in names
    )


def _evaluated(module: types.ModuleType, expression: ast.expr) -> Any:
    """A default, which the module itself could evaluate."""
    try:
        code = compile(ast.Expression(expression), module.__file__ or "", "eval", dont_inherit=True)
        return eval(code, module.__dict__)
    except Exception:  # noqa: BLE001 (a name of the class, say)
        return None


def _entry_name(module: types.ModuleType, stub: str, whole: bool) -> str:
    """`whole`: the file holds an autograd function and no marker, so that the stub may be its own entry."""
    entry = f"{stub}_autograd"
    return stub if whole and not callable(getattr(module, entry, None)) else entry


def _find_stubs(tree: ast.Module, file: str, several: bool) -> list[tuple[ast.FunctionDef, ast.Call]]:
    """The decorated functions, and the calls of their decorators: one, unless a module may have `several`."""
    names = autodiff_names(tree)
    found: list[tuple[ast.FunctionDef, ast.expr]] = []
    for node in tree_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                callee = decorator.func if isinstance(decorator, ast.Call) else decorator
                name = callee.id if isinstance(callee, ast.Name) else getattr(callee, "attr", None)
                if name in names:
                    found.append((node, decorator))  # type: ignore[arg-type]
    if not found:
        raise Unusable("no_stub", "no function is decorated with @autodiff(...)", file, remedy=_USAGE)
    if len(found) > 1 and not several:
        stubs = ", ".join(f"{node.name} (line {node.lineno})" for node, _ in found)
        raise Unusable(
            "two_stubs",
            f"one file has one stub, but {len(found)} functions are decorated: {stubs}",
            file,
            found[1][0].lineno,
            remedy="put each stub with its kernels into a file of its own",
        )
    return [(_plain_function(node, decorator, file)) for node, decorator in found]


def _plain_function(
    node: ast.FunctionDef, decorator: ast.expr, file: str
) -> tuple[ast.FunctionDef, ast.Call]:
    if not isinstance(decorator, ast.Call):
        raise Unusable(
            "stub_args",
            "@autodiff is used without parentheses",
            file,
            decorator.lineno,
            decorator.col_offset + 1,
            _USAGE,
        )
    if isinstance(node, ast.AsyncFunctionDef):
        raise Unusable("stub_args", f"{node.name} is an async function", file, node.lineno)
    return node, decorator


def _execute(file: str, source: str, mode: str, answers: devices.Answers, whole: bool) -> types.ModuleType:
    """Run the module's top level. What is `whole` holds the code that is to be judged, and may change
    nothing of what judges it."""
    name = f"{_package()}kernel_agent_user_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Triton reads the source of kernels through inspect and linecache.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module
    compat.decorate_as_compiled()
    launches.set_mode(mode)
    context = contextlib.nullcontext() if mode == "cuda" else devices.answering(answers)
    try:
        with context:
            if whole and ("torch.compile" in source or "_dynamo" in source):
                importlib.import_module("torch._dynamo")  # which changes functions of torch when first used
            before = intact.taken() if whole else {}
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 (this is what loading means)
            intact.require_unchanged(before, file)
    except Unusable:
        raise
    except SystemExit as exc:
        raise wrap("import", "the file ends the process when it is imported: ", exc, [file]) from exc
    except MisusedMark as exc:
        raise wrap("stub_args", "", exc, [file], _USAGE) from exc
    except PermissionError as exc:
        raise wrap("import", "the file cannot be imported: ", exc, [file], _UNREADABLE) from exc
    except Exception as exc:
        raise wrap("import", "the file cannot be imported: ", exc, [file]) from exc
    return module


def _package() -> str:
    """The package that the file is a module of, with a dot behind it; "" for none. The program leaves its
    name beside the copies of the user's modules, which stand last on the path."""
    found = Path(sys.path[-1]) / ".package"
    return found.read_text() + "." if found.is_file() else ""


def _function(module: types.ModuleType, name: str) -> Callable[..., Any] | None:
    value = getattr(module, name, None)
    return value if callable(value) else None


def _misused(message: str, decorator: ast.Call, file: str) -> Unusable:
    return Unusable("stub_args", message, file, decorator.lineno, decorator.col_offset + 1, _USAGE)


def _positions_argument(decorator: ast.Call, file: str) -> ast.expr:
    """The one argument of @autodiff(...), however it is spelled."""
    known = ("inputs_require_grad", "idxs_buffers")
    for keyword in decorator.keywords:
        if keyword.arg not in known:
            raise _misused(f"@autodiff has no argument {keyword.arg!r}", decorator, file)
    values = [keyword.value for keyword in decorator.keywords] + decorator.args
    if len(values) != 1:
        raise _misused("@autodiff takes one tuple of positions", decorator, file)
    return values[0]


def _grads(
    decorator: ast.Call,
    module: types.ModuleType,
    params: tuple[inspect.Parameter, ...],
    file: str,
) -> tuple[str, ...]:
    """The decorator's positions as parameter names."""
    argument = _positions_argument(decorator, file)
    try:
        given = eval(compile(ast.Expression(argument), file, "eval", dont_inherit=True), module.__dict__)
        positions = [given] if isinstance(given, int) else list(given)
    except Exception as exc:
        raise _misused(f"the positions of @autodiff cannot be evaluated: {exc}", decorator, file) from exc
    problem = _problem_with(positions, params)
    if problem is not None:
        raise _misused(problem, decorator, file)
    return tuple(params[position].name for position in sorted(positions))


def _problem_with(positions: list[Any], params: tuple[inspect.Parameter, ...]) -> str | None:
    if not positions:
        return "@autodiff names no input"
    for position in positions:
        if not isinstance(position, int) or isinstance(position, bool):
            return f"{position!r} is not a position in the stub's signature"
        if not 0 <= position < len(params):
            return f"position {position} is outside the stub's {len(params)} parameters"
        if params[position].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            return (
                f"parameter {params[position].name!r} collects several arguments and cannot have a gradient"
            )
    if len(set(positions)) != len(positions):
        return f"the positions {tuple(positions)} repeat"
    return None


def _kernels(module: types.ModuleType, file: str) -> dict[str, Any]:
    """Kernels of the module that are written in this file."""
    kernels = {}
    for name, value in vars(module).items():
        inner = launches.jit_function(value)
        if inner is not None and inner.fn.__code__.co_filename == file:
            kernels[name] = value
    return kernels


def _sweep(module: types.ModuleType, tree: ast.Module, file: str, name: str) -> list[Shape]:
    line = _assigned_at(tree, name)
    remedy = f'write {name} = [{{"M": 128, "N": 64}}, {{"M": 4096, "N": 4096, "required": False}}]'
    if not hasattr(module, name):
        raise Unusable("sweep_missing", f"the file has no {name}", file, remedy=remedy)
    value = getattr(module, name)
    if not isinstance(value, (list, tuple)):
        raise Unusable(
            "sweep_type",
            f"{name} is a list of dicts of dimensions, not {type(value).__name__}",
            file,
            line,
            None,
            remedy,
        )
    if not value:
        raise Unusable("sweep_empty", f"{name} has no entry", file, line, None, remedy)
    return [_shape(entry, index, name, file, line, remedy) for index, entry in enumerate(value)]


def _shape(entry: Any, index: int, name: str, file: str, line: int | None, remedy: str) -> Shape:
    def refuse(message: str) -> Unusable:
        return Unusable("sweep_type", f"{name}[{index}] {message}", file, line, None, remedy)

    if not isinstance(entry, dict):
        raise refuse(f"is a dict of dimensions, not {type(entry).__name__}")
    if not all(isinstance(key, str) for key in entry):
        raise refuse("has a key that is not a string")
    required = entry.get("required", True)
    if not isinstance(required, bool):
        raise refuse(f"has required={required!r}, which is neither True nor False")
    dims = {key: value for key, value in entry.items() if key != "required"}
    if list(dims) == ["dims"] and isinstance(dims["dims"], dict):
        dims = dims["dims"]
    if not dims:
        raise refuse("has no dimensions")
    dims = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in dims.items()}
    for key, value in dims.items():
        if not _is_plain(value):
            raise refuse(f"has {key}={value!r}, which is not a number, string, flag or list of them")
    return Shape(dims, required)


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the value."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _assigned_at(tree: ast.Module, name: str) -> int | None:
    for node in tree_nodes(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.lineno  # type: ignore[attr-defined]
    return None


def _dtype_called(name: Any) -> Any:
    value = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return value if isinstance(value, torch.dtype) else name


def _dtype_dims(module: types.ModuleType, *sweeps: str) -> frozenset[str]:
    """Keys under which SWEEP names dtypes, as torch has them."""
    entries = [entry for name in sweeps for entry in getattr(module, name, ())]
    return frozenset(
        key
        for entry in entries
        for key, value in {**entry, **(entry.get("dims") or {})}.items()
        if isinstance(value, torch.dtype)
    )


def default_dtype(make_args: Callable[..., Any], sweep: Sequence[Mapping[str, Any]] = ()) -> torch.dtype:
    """The default of make_args' dtype parameter; where it says nothing, that of the first of `sweep`'s
    entries; else float32."""
    try:
        parameter = inspect.signature(make_args).parameters.get("dtype")
    except (TypeError, ValueError):
        return torch.float32
    value = parameter.default if parameter is not None else None
    for said in (value, sweep[0].get("dtype") if sweep else None):
        if isinstance(found := _dtype_called(said), torch.dtype):
            return found
    return torch.float32
