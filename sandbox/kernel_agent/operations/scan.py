"""Operation scan: reads a candidate's source and says what an honest Triton backward does not contain.

Nothing is executed. The scan is the first of several guards (a record of the backward's torch operations, a
rerun without launches, the verdict itself): it gives early and readable reasons, and need not catch what
those catch.

`reject` findings end an attempt; `warn` findings are shown to whoever wrote it, and a `note` in the report.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from .. import handwritten
from ..handwritten import HandWritten
from ..source import MARKER, autodiff_names, backward_starts, parse, read, tree_nodes, words
from . import nameable as closed
from .asked import Asked
from .borrowed import Borrowed
from .elsewhere import Elsewhere, around
from .nameable import Names

FORBIDDEN_NAMES = words(
    """exec eval compile open input breakpoint exit quit globals locals vars __import__ getattr hasattr
    setattr delattr os sys gc inspect ctypes subprocess importlib builtins pathlib pickle threading help
    copyright credits license multiprocessing socket __name__ __file__ __spec__ __loader__ __package__
    __cached__ __dict__"""
)
# Special methods that a class may define: any other runs where nobody sees a call.
_SPECIAL = frozenset({"__init__", "__post_init__", "__call__"})
_ADDING = frozenset({"triton.language.atomic_add", "triton.language.atomic_xor"})
_CONTEXT_METHODS = frozenset({"forward", "backward", "setup_context"})
_MAKERS = frozenset({"__init__", "__post_init__"})
_OUR_MARK = "kernel_agent.autodiff"
_BASES = frozenset(
    {"torch.autograd.Function", "torch.autograd.function.Function", "typing.NamedTuple", "typing.Protocol"}
    | {"typing.Generic", "typing.TypedDict"}
    | {f"enum.{name}" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")}
)


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str
    line: int
    message: str


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op scan. Raises Unusable("syntax") for a file that does not parse."""
    file = str(Path(request["file"]).resolve())
    source = read(file)
    return scan(source, parse(source, file), request.get("function"), around(request.get("modules")))


def scan(
    source: str, tree: ast.Module, function: str | None = None, elsewhere: Elsewhere | None = None
) -> dict[str, Any]:
    """Findings in order of lines, the entry's name and the kernels' names. `function`: which of a module's is
    meant, None for the first. `elsewhere`: the user's other modules."""
    start = backward_starts(source)
    scanner = _Scanner(tree, start, function, elsewhere)
    findings = sorted(scanner.findings(), key=lambda finding: (finding.line, finding.rule))
    return {
        "findings": [asdict(finding) for finding in findings],
        "entry": scanner.entry_name,
        "kernels": sorted(scanner.kernels, key=lambda name: scanner.kernels[name].lineno),
        "launches": scanner.launches(),
    }


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _dotted(node: ast.expr) -> str:
    """`torch.autograd.grad` for a dotted name, with `?` for what is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _first_term(pointer: ast.expr) -> str | None:
    """`x_ptr` of `x_ptr + row * stride + cols`."""
    while isinstance(pointer, ast.BinOp):
        pointer = pointer.left
    return pointer.id if isinstance(pointer, ast.Name) else None


def _in_tf32(dot: ast.AST) -> bool:
    """Whether a tl.dot says so, or says nothing; by name, or as Triton orders its parameters. What is no
    literal may be anything."""
    if not isinstance(dot, ast.Call):
        return False
    said = dict(zip(("input", "other", "acc", "input_precision", "allow_tf32"), dot.args, strict=False))
    said |= {k.arg: k.value for k in dot.keywords if k.arg}
    named = [said[name] for name in ("input_precision", "allow_tf32") if name in said]
    values = [node.value for node in named if isinstance(node, ast.Constant) and node.value is not None]
    silent = all(isinstance(node, ast.Constant) and node.value is None for node in named)
    return silent or "tf32" in values or True in values


def _is_launch(node: ast.AST) -> bool:
    """kernel[grid](...)"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a definition or assignment at the top level binds; imports may repeat the forward's."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {n.id for n in tree_nodes(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


def _declared(node: ast.AST) -> set[str]:
    """Names that a definition declares to be global."""
    return {name for g in tree_nodes(node) if isinstance(g, ast.Global) for name in g.names}


def _assignments(function: ast.AST, name: str) -> set[str] | None:
    """The statements that assign to a name; None where something else binds it."""
    binds = {n for n in tree_nodes(function) if _is_name(n, name) and not isinstance(n.ctx, ast.Load)}
    found: set[str] = set()
    for node in tree_nodes(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            here = binds & set(tree_nodes(node))
            found |= {ast.dump(node)} if here else set()
            binds -= here
    return None if binds else found


def _swallows_around_yield(node: ast.Try) -> bool:
    """Whether a context manager made of this may end what was raised inside its `with`."""
    ends = (ast.Return, ast.Break, ast.Continue)
    swallows = node.handlers or any(isinstance(n, ends) for f in node.finalbody for n in tree_nodes(f))
    return bool(swallows) and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in tree_nodes(node))


def _is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name


class _Scanner:
    """The backward part of one file: everything after the marker, or, where there is none, one autograd
    function, what calls it, and what of the file these reach."""

    def __init__(
        self,
        tree: ast.Module,
        start: int | None,
        function: str | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.elsewhere = elsewhere
        self.scanned: set[tuple[Path, str]] = set()  # functions of other modules
        self.tree = tree
        self.start = start
        self.body = [node for node in tree.body if node.lineno > (start or 0)]
        self.names = Names(tree)
        self.asked = Asked(tree, self.names, elsewhere.folder if elsewhere is not None else None)
        functions = [node for node in tree_nodes(tree) if isinstance(node, ast.FunctionDef)]
        self.kernels = {node.name: node for node in functions if closed.is_kernel(node, self.names)}
        self.own = self._find_own(function) if start is None else None
        self.entry = self._find_entry(functions)
        self.taking_part = self._taking_part()
        self.function = self._find_function()
        self.stub_texts = self._stub_texts()
        launching = self._stub_functions(with_methods=True) if self.own is None else ()
        self.borrowed = Borrowed(tree, self.names, launching, elsewhere)
        self.forward_side = self._forward_side()
        self.judged = {node for part in self.taking_part for node in tree_nodes(part)}
        assigned = [part for part in self.taking_part if isinstance(part, (ast.Assign, ast.AnnAssign))]
        self.settings = {node for part in assigned for node in tree_nodes(part)}
        self.contexts, self.context_of = self._contexts()
        self.stored = {n.attr for n in self.contexts if not isinstance(n.ctx, ast.Load)} | {
            f.name for f in tree_nodes(tree) if isinstance(f, ast.FunctionDef)
        }

    def _stubs(self) -> list[ast.FunctionDef]:
        """What is decorated with @autodiff(...)."""
        names = autodiff_names(self.tree)
        return [
            node
            for node in tree_nodes(self.tree)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and _last_name(decorator.func) in names
        ]

    def _find_own(self, name: str | None) -> HandWritten | None:
        """What people wrote themselves and is to be checked: it is called `name`, or the first."""
        found, functions = handwritten.all_of(self.tree), handwritten.functions_of(self.tree)
        stubs = [stub for stub in self._stubs() if name in (None, stub.name)]
        if stubs and functions:
            known = [one for one in found if one.name == stubs[0].name]
            others = [HandWritten(stubs[0].name, stubs[0].lineno, functions[-1], stubs[0], ())]
            return (known or others)[0]
        return next((one for one in found if name in (None, *handwritten.called_as(one))), None)

    def _find_entry(self, functions: list[ast.FunctionDef]) -> ast.FunctionDef | None:
        wanted = {f"{stub.name}_autograd" for stub in self._stubs()}
        top = [node for node in self.body if isinstance(node, ast.FunctionDef)]
        entries = [node for node in top if node.name in wanted]
        if not entries and self.own is not None:
            entries = [node for node in top if node.name == self.own.name]
        return entries[-1] if entries else None

    @property
    def entry_name(self) -> str | None:
        """The entry; of a module that people wrote themselves maybe an alias of `apply`."""
        if self.entry is not None:
            return self.entry.name
        return self.own.name if self.own is not None else None

    def _find_function(self) -> ast.ClassDef | None:
        """The last class derived from torch.autograd.Function, or the one that is meant."""
        if self.own is not None:
            return self.own.function
        return (self._classes() or [None])[-1]  # type: ignore[list-item]

    def _functions(self) -> dict[str, ast.FunctionDef]:
        """Host functions of the top level."""
        found = [f for f in self.tree.body if isinstance(f, ast.FunctionDef)]
        return {f.name: f for f in found if f not in self.kernels.values()}

    def _reached(self, roots: list[ast.FunctionDef]) -> list[ast.FunctionDef]:
        """The roots and every host function of the file that they name, directly or not."""
        functions, found, todo = self._functions(), list[ast.FunctionDef](), list(roots)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.append(node)
            names = {n.id for n in tree_nodes(node) if isinstance(n, ast.Name)}
            todo += [functions[name] for name in sorted(names & functions.keys())]
        return found

    def _stub_texts(self) -> set[str]:
        """Every expression of the stub, and of what it calls, as written in the forward part."""
        reached = self._stub_functions()
        return {ast.dump(node) for f in reached for node in tree_nodes(f) if isinstance(node, ast.expr)}

    def _stub_functions(self, with_methods: bool = False) -> list[ast.FunctionDef]:
        """The stub, and what it calls, in the forward part; `with_methods`: forwards of Functions that are
        named there, too."""
        names = {self.entry.name.removesuffix("_autograd")} if self.entry is not None else set()
        stubs = [f for f in self._functions().values() if f.name in names and f not in self.body]
        reached = [f for f in self._reached(stubs) if f not in self.body]
        named = (
            {n.id for f in reached for n in tree_nodes(f) if isinstance(n, ast.Name)} if with_methods else ()
        )
        owners = [n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name in named]
        methods = [m for n in owners if n not in self.body for m in n.body if isinstance(m, ast.FunctionDef)]
        forwards = [m for m in methods if m.name == "forward"]
        return [f for f in self._reached(reached + forwards) if f not in self.body] if forwards else reached

    def _forward_side(self) -> set[ast.AST]:
        """Nodes of the entry, of a Function's forward and of their helpers, that no backward reaches.

        A forward of several launches may have to be written out there, with the torch operations that the
        stub does in between: those, word for word, are the user's own. That they are done no more often than
        by the stub is for the record of operations to say (candidate.py).
        """
        methods = [method for method in self._methods() if method.name in ("forward", "setup_context")]
        backwards = [method for method in self._methods() if method not in methods]
        roots = methods + ([self.entry] if self.entry is not None else [])
        shared = self._reached(backwards)
        mine = [f for f in self._reached(roots) if f not in shared and (f in self.body or f in methods)]
        return {node for f in mine for node in tree_nodes(f)}

    def _is_stubs_own(self, node: ast.expr) -> bool:
        """Of a module that people wrote themselves the whole forward is."""
        return node in self.forward_side and (self.own is not None or self._is_written(node))

    def _is_written(self, node: ast.expr) -> bool:
        """Whether the stub has it, or a launcher of another module that it calls."""
        return ast.dump(node) in self.stub_texts or self.borrowed.has(node)

    def _is_heuristic(self, node: ast.expr) -> bool:
        """`kernel.fn.values["BLOCK"](...)`: a rule of an imported kernel that the stub launches is asked. It
        runs with the launch too."""
        if node not in self._asked or node not in self.forward_side:
            return False
        kernel = node.value  # type: ignore[attr-defined]
        while isinstance(kernel, ast.Attribute) and kernel.attr == "fn":
            kernel = kernel.value
        return self._is_written(kernel)

    @cached_property
    def _asked(self) -> set[ast.expr]:
        """The `values` of which an entry is called."""
        called = [n.func for n in tree_nodes(self.tree) if isinstance(n, ast.Call)]
        entries = [func.value for func in called if isinstance(func, ast.Subscript)]
        return {value for value in entries if isinstance(value, ast.Attribute) and value.attr == "values"}

    def _is_mine(self, node: ast.AST) -> bool:
        return node in self.judged if self.own is not None else node.lineno > (self.start or 0)  # type: ignore[attr-defined]

    def _taking_part(self) -> list[ast.AST]:
        """The autograd function, the entry, and what of the top level they name, directly or not."""
        if self.own is None:
            return []
        named: dict[str, list[ast.stmt]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node in self.kernels.values():
                continue
            for name in _bound(node):
                named.setdefault(name, []).append(node)
        todo: list[ast.stmt] = [self.own.function]
        todo += [self.entry] if self.entry is not None else []
        found: list[ast.AST] = []
        while todo:
            part = todo.pop(0)
            if part not in found:
                found.append(part)
                said = {n.id for n in tree_nodes(part) if isinstance(n, ast.Name)}
                todo += [node for name in sorted(said & named.keys()) for node in named[name]]
        return found

    def _contexts(self) -> tuple[set[ast.Attribute], dict[ast.AST, str]]:
        """Attributes of a Function's context, and of an object that its own class makes; and the context's
        name of every node of such a method."""
        attributes: set[ast.Attribute] = set()
        of: dict[ast.AST, str] = {}
        for owner in (node for node in self.body if isinstance(node, ast.ClassDef)):
            methods = _CONTEXT_METHODS if owner in self._classes() else _MAKERS
            for method in owner.body:
                if not isinstance(method, ast.FunctionDef) or not method.args.args:
                    continue
                if method.name not in methods or (methods is _MAKERS and method.decorator_list):
                    continue
                name, nodes = method.args.args[0].arg, list(tree_nodes(method))
                if any(_is_name(n, name) and not isinstance(n.ctx, ast.Load) for n in nodes):
                    continue  # bound to something else on the way
                attributes |= {n for n in nodes if isinstance(n, ast.Attribute) and _is_name(n.value, name)}
                of |= dict.fromkeys(nodes, name)
        return attributes, of

    def _classes(self) -> list[ast.ClassDef]:
        """The Functions; of a module that people wrote themselves those that take part."""
        classes = [node for node in self.body if isinstance(node, ast.ClassDef)]
        if self.own is not None:
            classes = [node for node in classes if node in self.taking_part]
        return [c for c in classes if any(_last_name(base) == "Function" for base in c.bases)]

    def findings(self) -> Iterator[Finding]:
        yield from self._structure()
        yield from self._imports()
        yield from self._module_level()
        yield from self._stores()
        if self.own is not None:
            yield from self._patches()
        for node in self._host_nodes():
            yield from self._node(node)
        for kernel in self.kernels.values():
            if kernel.lineno > (self.start or 0):
                yield from self._kernel(kernel)

    def launches(self) -> list[str]:
        """The kernels of a pair's backward that it launches by their names."""
        launched = {
            node.func.value.id
            for node in tree_nodes(self.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        own = {name for name, node in self.kernels.items() if self.start and node.lineno > self.start}
        return sorted(launched & own)

    def _structure(self) -> Iterator[Finding]:
        last = self.tree.body[-1].lineno if self.tree.body else 1
        if self.start is None:
            yield Finding(
                "marker",
                "warn",
                1,
                f"the file has no line {MARKER!r}: what takes part in the check is scanned",
            )
        if self.entry_name is None:
            yield Finding("entry", "reject", last, "there is no function <stub>_autograd")
        if self.function is None:
            yield Finding(
                "function", "reject", last, "there is no class derived from torch.autograd.Function"
            )
            return
        methods = {node.name: node for node in self.function.body if isinstance(node, ast.FunctionDef)}
        backward = methods.get("backward")
        if "forward" not in methods or backward is None:
            line = self.function.lineno
            yield Finding("function", "reject", line, f"class {self.function.name} lacks forward or backward")
        elif not self._launches(backward, set()) and not self._may_scale(methods["forward"]):
            yield Finding("no_launch", "reject", backward.lineno, "the backward launches no Triton kernel")

    def _may_scale(self, forward: ast.FunctionDef) -> bool:
        """The backward may do no more than scale what the forward's kernels made: whether it does, and the
        upstream is one number, shows when it runs (agent/core/conduct.c)."""
        return self.own is not None and self._launches(forward, set())

    def _launches(self, node: ast.AST, seen: set[str]) -> bool:
        """Whether a launch is reached from here, directly or through functions of this file."""
        functions = self._functions()
        for inner in tree_nodes(node):
            if _is_launch(inner):
                return True
            name = inner.id if isinstance(inner, ast.Name) else None
            if name in functions and name not in seen and self._launches(functions[name], seen | {name}):
                return True
        return False

    def _imports(self) -> Iterator[Finding]:
        """Of a module that people wrote themselves only what takes part: what is imported is judged where it
        is named."""
        for node in tree_nodes(self.tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            mine = self._is_mine(node)
            if mine and (self.borrowed if self.own is None else self.asked).may_import(node):
                continue
            for path in closed.imported(node):
                broken = closed.judge_import(path)
                if path.split(".")[0] not in closed.MODULES and path != _OUR_MARK:
                    message = f"imports {path}: {closed.importable()}"
                    yield Finding("import", "reject" if mine else "warn", node.lineno, message)
                elif broken is not None and mine:
                    yield Finding(broken[0], "reject", node.lineno, broken[1].replace("uses", "imports", 1))

    def _module_level(self) -> Iterator[Finding]:
        """The backward part defines; it runs nothing at import, and leaves the forward part's names alone."""
        if self.own is not None:
            return
        before = {
            name for node in self.tree.body if node.lineno <= (self.start or 0) for name in _bound(node)
        }
        for node in self.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_text and not isinstance(node, _DEFINITIONS):
                message = "only imports, definitions and assignments stand at the top level"
                yield Finding("module_code", "reject", node.lineno, message)
            said = {n for n in _declared(node) if not self._is_bound_alike(node, n)}
            for name in sorted(_bound(node) | said):
                if name in before or name in self.names.imported:
                    message = f"gives {name} another meaning: the forward part stays as it is"
                    yield Finding("redefined", "reject", node.lineno, message)

    def _is_bound_alike(self, node: ast.stmt, name: str) -> bool:
        """Whether a copy of a host function gives a global name only what that function gives it."""
        of = [
            function
            for function in self.tree.body
            if isinstance(node, ast.FunctionDef)
            and isinstance(function, ast.FunctionDef)
            and function.lineno <= (self.start or 0)
            and node.name == f"{function.name}_autograd"
            and name in _declared(function)
        ]
        made, given = _assignments(node, name), _assignments(of[0], name) if of else None
        return made is not None and given is not None and made <= given

    def _stores(self) -> Iterator[Finding]:
        """Attributes are set on the context of a Function only: anything else patches what others rely on."""
        for node in self._host_nodes():
            if (
                isinstance(node, ast.Attribute)
                and not isinstance(node.ctx, ast.Load)
                and node not in self.contexts
            ):
                yield Finding(
                    "patch",
                    "reject",
                    node.lineno,
                    f"sets {_dotted(node)}, which is no attribute of a context",
                )

    def _patches(self) -> Iterator[Finding]:
        """The rest of a module that people wrote themselves is theirs, but the oracle's process imports it
        too: it changes nothing of other modules, and looks for none."""
        for node in tree_nodes(self.tree):
            said = self._patch(node) if node not in self.judged - self.settings else None
            if said is not None:
                message = f"{said}: what judges the module runs beside it, and stays as it is"
                yield Finding("patch", "reject", node.lineno, message)  # type: ignore[attr-defined]

    def _patch(self, node: ast.AST) -> str | None:
        path = self.names.path(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
        if isinstance(node, ast.Attribute):
            if node.attr in closed.HIDDEN:
                return f"uses {_dotted(node)}"
            if path and not isinstance(node.ctx, ast.Load) and not path.startswith(closed.SETTINGS):
                return f"sets {path}"
        if path and closed.leads_to_others(path):
            return f"uses {path}"
        if isinstance(node, ast.Name) and node.id in ("exec", "eval", "__import__", "__builtins__"):
            return f"uses {node.id}"
        called = _last_name(node.func) if isinstance(node, ast.Call) and node.args else None
        if called in ("setattr", "delattr", "vars") and self.names.path(node.args[0]):  # type: ignore[attr-defined]
            return f"uses {called} on {_dotted(node.args[0])}"  # type: ignore[attr-defined]
        return None

    def _methods(self) -> Iterator[ast.FunctionDef]:
        """forward, backward and setup_context of the Functions."""
        for node in self._classes():
            yield from (item for item in node.body if isinstance(item, ast.FunctionDef))

    def _kernel(self, kernel: ast.FunctionDef) -> Iterator[Finding]:
        """A kernel's body is triton.language: interpreted, it could otherwise run any host code."""
        host = {n.name for n in self.tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        host -= set(self.kernels)
        own = {arg.arg for arg in tree_nodes(kernel.args) if isinstance(arg, ast.arg)}
        names = [n for n in tree_nodes(kernel) if isinstance(n, ast.Name)]
        own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        for node in (node for statement in kernel.body for node in tree_nodes(statement)):
            if isinstance(node, ast.Name) and not node.id.startswith("__"):
                root = (self.names.path(node) or "").split(".")[0]
                if node.id not in (FORBIDDEN_NAMES | host) - own and root in ("", "triton", "math"):
                    continue
                what = f"{node.id}, which is not triton.language"
            elif isinstance(node, (ast.Name, ast.Attribute)):
                path = self.names.path(node) or ""
                if isinstance(node, ast.Attribute) and not (
                    node.attr.startswith("_")
                    or node.attr in closed.FRAMES
                    or (path.startswith("triton.") and closed.BEHIND & set(path.split(".")))
                ):
                    continue
                what = _dotted(node)
            else:
                continue
            yield Finding("kernel", "reject", node.lineno, f"the kernel {kernel.name} uses {what}")
        for call in (node for node in tree_nodes(kernel) if isinstance(node, ast.Call)):
            if _is_name(call.func, "isinstance") and any(self._is_of_language(n) for n in tree_nodes(call)):
                message = (
                    f"the kernel {kernel.name} asks how a value is kept, which is another if it is compiled"
                )
                yield Finding("kernel", "reject", call.lineno, message)
        yield from self._notes(kernel)
        yield from self._trials(kernel)

    def _is_of_language(self, node: ast.AST) -> bool:
        path = self.names.path(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
        return (path or "").startswith("triton.language.")

    def _notes(self, kernel: ast.FunctionDef) -> Iterator[Finding]:
        """What a kernel leaves to the machine: one of each is told, at its first line."""
        told: set[str] = set()
        for node in tree_nodes(kernel):
            path = self.names.path(node.func) if isinstance(node, ast.Call) else None
            given = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
            if path == "triton.language.load" and "mask" in given and "other" not in given:
                said = "loads under a mask without other=: those lanes are 0 here, and anything when compiled"
            elif path == "triton.language.dot" and _in_tf32(node):
                said = (
                    "multiplies (tl.dot) in TF32, the default of input_precision: float32 is rounded on a GPU"
                )
            else:
                continue
            if said not in told:
                told.add(said)
                yield Finding("note", "note", node.lineno, f"the kernel {kernel.name} {said}")  # type: ignore[attr-defined]

    def _trials(self, kernel: ast.FunctionDef) -> Iterator[Finding]:
        """An autotuner of several configurations launches a kernel many times before it counts: what that
        adds to memory has to be taken back after each trial."""
        cleared = self._cleared(kernel)
        if cleared is None:
            return
        parameters = {arg.arg for arg in tree_nodes(kernel.args) if isinstance(arg, ast.arg)}
        pointers = {
            target.id: node.value
            for node in tree_nodes(kernel)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in tree_nodes(kernel):
            if not isinstance(node, ast.Call) or self.names.path(node.func) not in _ADDING or not node.args:
                continue
            to, seen = _first_term(node.args[0]), set[str]()
            while to is not None and to not in parameters and to in pointers and to not in seen:
                seen.add(to)
                to = _first_term(pointers[to])
            if to in parameters and to not in cleared:
                said = f"is tuned, and each trial adds to {to}: name it in reset_to_zero"
                yield Finding("autotune", "reject", node.lineno, f"the kernel {kernel.name} {said}")

    def _cleared(self, kernel: ast.FunctionDef) -> set[str] | None:
        """What an autotuner sets back after a trial; None where there are no trials, or nobody can tell."""
        tuners = [d for d in kernel.decorator_list if isinstance(d, ast.Call)]
        tuners = [d for d in tuners if (self.names.path(d.func) or "").endswith(".autotune")]
        if not tuners:
            return None
        given = {keyword.arg: keyword.value for keyword in tuners[0].keywords}
        configs: ast.expr | None = tuners[0].args[0] if tuners[0].args else given.get("configs")
        if isinstance(configs, ast.Name):
            name = configs.id
            assigned = [n for n in self.tree.body if isinstance(n, ast.Assign) and name in _bound(n)]
            configs = assigned[-1].value if assigned else None
        said = [*tree_nodes(tuners[0]), *(tree_nodes(configs) if configs is not None else ())]
        if any(isinstance(node, ast.keyword) and node.arg in ("pre_hook", None) for node in said):
            return None
        several = isinstance(configs, ast.ListComp) or (
            isinstance(configs, (ast.List, ast.Tuple)) and len(configs.elts) > 1
        )
        lists = [given[name] for name in ("reset_to_zero", "restore_value") if name in given]
        if not several or not all(isinstance(value, (ast.List, ast.Tuple)) for value in lists):
            return None
        constants = [n for value in lists for n in tree_nodes(value) if isinstance(n, ast.Constant)]
        return {n.value for n in constants if isinstance(n.value, str)}

    def _host_nodes(self) -> Iterator[ast.AST]:
        """Nodes of the backward part outside kernels; of a module that people wrote themselves what takes
        part in the check."""
        todo: list[ast.AST] = list(self.body) if self.own is None else list(self.taking_part)
        while todo:
            node = todo.pop()
            if isinstance(node, ast.FunctionDef) and node in self.kernels.values():
                continue
            yield node
            todo.extend(ast.iter_child_nodes(node))

    def _node(self, node: ast.AST) -> Iterator[Finding]:
        if isinstance(node, ast.Try) and self._launches(node, set()):
            yield Finding(
                "try", "reject", node.lineno, "a launch inside try can hide a failure behind a fallback"
            )
        elif isinstance(node, ast.Try) and _swallows_around_yield(node):
            message = "a yield inside try can hide a failure of the launches in its with block"
            yield Finding("try", "reject", node.lineno, message)
        elif isinstance(node, ast.Name):
            yield from self._name(node)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
        elif isinstance(node, ast.ClassDef):
            yield from self._class(node)
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
            yield Finding("forbidden", "reject", node.lineno, "runs as a coroutine (async)")
        elif isinstance(node, ast.MatchClass) and node.kwd_attrs:
            names = ", ".join(node.kwd_attrs)
            message = f"reads attributes by a pattern of match ({names}): write them out"
            yield Finding("forbidden", "reject", node.cls.lineno, message)
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and not self._is_stubs_own(node)
        ):
            yield Finding("torch_math", "reject", node.lineno, "multiplies matrices outside a kernel (@)")
        elif isinstance(node, ast.Call):
            yield from self._call(node)

    def _is_asked(self, node: ast.expr) -> bool:
        """Whether it stands in a question about what a module that people wrote themselves runs on."""
        return self.own is not None and node in self.asked.nodes

    def _name(self, node: ast.Name) -> Iterator[Finding]:
        if self._is_asked(node):
            return
        special = node.id.startswith("__") and node.id not in ("__name__", "__doc__", "__all__")
        if special or (node.id in FORBIDDEN_NAMES and not self._is_variable(node.id)):
            if node not in self._literal_lookups and not (
                node in self.settings and node.id in ("os", "sys", "__name__")
            ):
                yield Finding("forbidden", "reject", node.lineno, f"uses {node.id}")
        elif node not in self._roots:
            yield from self._path(node)

    def _is_variable(self, name: str) -> bool:
        """A parameter may well be called `input`; nothing harmful hides behind that name."""
        return name in ("input", "vars") and any(
            isinstance(node, ast.arg) and node.arg == name for node in tree_nodes(self.tree)
        )

    @cached_property
    def _roots(self) -> set[ast.AST]:
        """What stands before a dot, or is looked into by a literal name: the whole chain is judged."""
        chains = [node for node in tree_nodes(self.tree) if isinstance(node, ast.Attribute)]
        return {node.value for node in (*chains, *self._literal_lookups.values())}

    @cached_property
    def _literal_lookups(self) -> dict[ast.AST, ast.Attribute]:
        """The `getattr` and `hasattr` of calls with a literal name, and the attributes that they read."""
        found: dict[ast.AST, ast.Attribute] = {}
        for node in tree_nodes(self.tree):
            if not isinstance(node, ast.Call) or len(node.args) < 2 or node.keywords:
                continue
            name = node.args[1]
            if not (_is_name(node.func, "getattr") or _is_name(node.func, "hasattr")):
                continue
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found[node.func] = ast.copy_location(
                    ast.Attribute(node.args[0], name.value, ast.Load()), node
                )
        return found

    def _path(self, node: ast.expr) -> Iterator[Finding]:
        """A name that an import bound, with all that is taken of it: only what the lists have."""
        path = self.names.path(node)
        if node in self._decorating or self._is_asked(node):
            return
        if self.own is not None and path in closed.SAYING:
            return
        if path in closed.AROUND:
            mine = self.own is None and not self._is_stubs_own(node)
            rule, severity = ("forbidden", "reject") if mine else ("note", "note")
            message = f"asks for {path}: no case of a check changes it, so that no gradient may hang on it"
            yield Finding(rule, severity, node.lineno, message)
            return
        if path == "torch.is_grad_enabled" and node not in self.forward_side:
            message = f"asks for {path} in a backward: its gradient is the same while it is recorded itself"
            yield Finding("forbidden", "reject", node.lineno, message)
        broken = closed.judge(path) if path is not None else None
        if broken is None:
            return
        rule, message = broken
        users = rule == "import" and path is not None and path.split(".")[0] not in closed.MODULES
        if (users or rule in ("torch_math", "autograd")) and self._is_stubs_own(node):
            return
        if users and self._is_heuristic(node):
            return
        if self.own is not None and node in self.forward_side and rule != "forbidden":
            return
        if rule == "import" and node in self.settings:
            return  # a value that people's own module got at import, from the environment perhaps
        if users and self.own is not None and path is not None and self.elsewhere is not None:
            found = self.elsewhere.find(path)
            if found is not None:
                yield from self._function_elsewhere(node, *found)
                return
        yield Finding(rule, "reject", node.lineno, message)

    def _function_elsewhere(
        self, node: ast.expr, elsewhere: Elsewhere, file: Path, tree: ast.Module, function: ast.FunctionDef
    ) -> Iterator[Finding]:
        """A function of another module of the user's, held to the same as those of this file."""
        if (file, function.name) in self.scanned:
            return
        self.scanned.add((file, function.name))
        for finding in _FunctionScanner(tree, function, elsewhere, self.scanned).findings():
            message = f"{function.name} of {file.name}, line {finding.line}: {finding.message}"
            yield Finding(finding.rule, finding.severity, node.lineno, message)

    def _attribute(self, node: ast.Attribute) -> Iterator[Finding]:
        dotted, known = _dotted(node), self.names.path(node)
        special = node.attr.startswith("__") and node.attr not in ("__name__", "__doc__", "__version__")
        if special or node.attr in closed.FRAMES | closed.HOOKS:
            yield Finding("forbidden", "reject", node.lineno, f"uses {dotted}")
        elif known is not None:
            if node not in self._roots:
                yield from self._path(node)
            return
        elif node.attr.startswith("_") and node.attr not in self.stored:
            yield Finding("forbidden", "reject", node.lineno, f"uses {dotted}, which is private")
        of_kernel = isinstance(node.value, ast.Name) and node.value.id in self.kernels
        if of_kernel and not (node.attr in closed.OF_KERNELS or self._is_stubs_own(node)):
            message = f"uses {dotted}: what is known of a kernel is another once it was compiled"
            yield Finding("forbidden", "reject", node.lineno, message)
        if node.attr in closed.TRAINING and not (node.attr in self.stored or self._is_stubs_own(node)):
            message = f"uses {dotted}: a gradient does not hang on how a tensor came about"
            yield Finding("forbidden", "reject", node.lineno, message)
        if node.attr in closed.GRAPH:
            yield Finding("autograd", "reject", node.lineno, f"uses {dotted}: the graph is autograd's")
        if node.attr in closed.VALUES and not self._is_stubs_own(node):
            yield Finding(
                "torch_math", "reject", node.lineno, f"uses {dotted}: host code gets a tensor's values"
            )
        if node.attr in _CONTEXT_METHODS and not self._is_own_call(node):
            message = f"uses {dotted}: autograd must not make the gradient, and calls a Function's methods"
            yield Finding("autograd", "reject", node.lineno, message)

    def _is_own_call(self, node: ast.Attribute) -> bool:
        """`Scale.backward(ctx, ...)` of a Function in this file, with the caller's own context, is an
        ordinary call: anything else in its place would be given attributes."""
        call = self._calls.get(node)
        if call is None or not call.args or node not in self.context_of:
            return False
        classes = {c.name for c in self.tree.body if isinstance(c, ast.ClassDef)}
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return owner in classes and _is_name(call.args[0], self.context_of[node])

    @cached_property
    def _decorating(self) -> set[ast.AST]:
        """Of a module that people wrote themselves: `functools.wraps(fn)` and `contextlib.contextmanager`
        where they decorate a function, and nothing else. There the first sets attributes of a function that
        has just been made, and the second runs a generator around a `with` block, which is scanned where it
        is written; called otherwise, wraps would set attributes of anything."""
        found: set[ast.AST] = set()
        for function in (n for n in tree_nodes(self.tree) if isinstance(n, ast.FunctionDef) and self.own):
            for decorator in function.decorator_list:
                call = decorator if isinstance(decorator, ast.Call) else None
                if call is not None and self.names.path(call.func) == "functools.wraps":
                    own = [arg for arg in call.args if isinstance(arg, ast.Name) and not self.names.path(arg)]
                    if len(call.args) == len(own) == 1 and not call.keywords:
                        found.add(call.func)
                elif self.names.path(decorator) == "contextlib.contextmanager":
                    found.add(decorator)
        return found

    @cached_property
    def _calls(self) -> dict[ast.AST, ast.Call]:
        return {node.func: node for node in tree_nodes(self.tree) if isinstance(node, ast.Call)}

    def _class(self, node: ast.ClassDef) -> Iterator[Finding]:
        """A class that is not what its name says runs host code where nobody sees a call."""
        own = {c.name for c in self.tree.body if isinstance(c, ast.ClassDef)}
        for base in [*node.bases, *(keyword.value for keyword in node.keywords)]:
            named = base.value if isinstance(base, ast.Subscript) else base
            if self.names.path(named) not in _BASES and not (isinstance(named, ast.Name) and named.id in own):
                yield Finding("subclass", "reject", node.lineno, f"derives from {_dotted(named)}")
        for item in node.body:
            made = {item.name} if isinstance(item, ast.FunctionDef) else _bound(item)
            for name in made:
                if name.startswith("__") and name not in _SPECIAL | {"__slots__"}:
                    yield Finding("forbidden", "reject", item.lineno, f"{node.name} defines {name}")

    def _call(self, node: ast.Call) -> Iterator[Finding]:
        read = self._literal_lookups.get(node.func)
        if read is not None:
            yield from self._attribute(read)
        if _is_name(node.func, "type") and len(node.args) != 1:
            yield Finding("forbidden", "reject", node.lineno, "makes a class by type()")
        name = _last_name(node.func)
        if not isinstance(node.func, ast.Attribute) or name is None or self.names.path(node.func) is not None:
            return  # a function of this file, or a builtin: scanned where it is written
        dotted = _dotted(node.func)
        if name in closed.AUTOGRAD and name not in _CONTEXT_METHODS:
            yield Finding(
                "autograd", "reject", node.lineno, f"calls {dotted}(): autograd must not make the gradient"
            )
        elif name in closed.MATH and not self._is_stubs_own(node):
            yield Finding(
                "torch_math", "reject", node.lineno, f"calls {dotted}(): kernels must compute the gradient"
            )


class _FunctionScanner(_Scanner):
    """A function of another module, and what it reaches there. No forward is in it: it may be called from
    anywhere."""

    def __init__(
        self,
        tree: ast.Module,
        function: ast.FunctionDef,
        elsewhere: Elsewhere,
        scanned: set[tuple[Path, str]],
    ) -> None:
        self.root = function
        super().__init__(tree, None, None, elsewhere)
        self.scanned = scanned
        self.forward_side = set()

    def _find_own(self, name: str | None) -> HandWritten:
        root = self.root
        return HandWritten(root.name, root.lineno, root, root, ())  # type: ignore[arg-type]

    def findings(self) -> Iterator[Finding]:
        if self.root in self.kernels.values():
            yield from self._kernel(self.root)
            return
        yield from self._stores()
        for node in self._host_nodes():
            yield from self._node(node)
