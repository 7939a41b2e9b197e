"""Wrong backwards made from a right one: each mutation is one replacement in the text below `# ---- backward ----`."""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MARKER = "# ---- backward ----"


@dataclass(frozen=True)
class Mutant:
    pair: str  # path of the pair
    kind: str
    line: int  # in the pair
    old: str
    new: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the table of equivalent mutants names it by."""
        return self.pair, self.kind, self.old

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(original.splitlines(), self.source.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def of(pair: str, source: str) -> list[Mutant]:
    """Every mutant of the pair, without repetitions."""
    mutator = _Mutator(pair, source)
    found: dict[str, Mutant] = {}
    for mutant in mutator.mutants():
        if mutant.source != source:
            found.setdefault(mutant.source, mutant)
    return list(found.values())


def _called(node: ast.AST) -> str:
    """`store` for tl.store(...), `` for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith(("triton.jit", "jit")) for d in node.decorator_list)


# Values written by a kernel, and what becomes of them.
_VALUES: dict[str, Callable[[str], str]] = {
    "zeroed": lambda value: f"({value}) * 0.0",
    "scaled by 1.01": lambda value: f"({value}) * 1.01",
    "scaled by 2": lambda value: f"({value}) * 2.0",
    "sign flipped": lambda value: f"-({value})",
    "accumulated in float16": lambda value: f"({value}).to(tl.float16)",
}
_ADDRESSING = (
    "arange",
    "program_id",
    "cdiv",
    "num_programs",
    "load",
    "make_block_ptr",
    "advance",
    "full",
    "zeros",
)


class _Mutator:
    def __init__(self, pair: str, source: str) -> None:
        self.pair = pair
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.bytes = source.encode()
        self.from_line = next(at for at, line in enumerate(self.lines, 1) if line.strip() == MARKER)
        self.tree = ast.parse(source)

    def mutants(self) -> Iterator[Mutant]:
        for node in self.tree.body:
            if node.lineno <= self.from_line:
                continue
            if isinstance(node, ast.FunctionDef) and _is_kernel(node):
                yield from self.of_kernel(node)
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "backward":
                        yield from self.of_backward(method)

    # ---- text

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def replace(self, kind: str, node: ast.AST, new: str) -> Mutant:
        start, end = self.span(node)
        source = (self.bytes[:start] + new.encode() + self.bytes[end:]).decode()
        return Mutant(self.pair, kind, node.lineno, self.text(node), new, source)  # type: ignore[attr-defined]

    # ---- kernels

    def of_kernel(self, kernel: ast.FunctionDef) -> Iterator[Mutant]:
        for node in ast.walk(kernel):
            name = _called(node)
            if isinstance(node, ast.Call):
                if name in ("store", "atomic_add") and len(node.args) > 1:
                    for kind, change in _VALUES.items():
                        yield self.replace(kind, node.args[1], change(self.text(node.args[1])))
                if name in ("store", "atomic_add", "load"):
                    yield from self.without_mask(node)
                if name == "atomic_add":
                    call = self.text(node)
                    yield self.replace(
                        "atomic replaced by store", node, call.replace("atomic_add", "store", 1)
                    )
                if name == "where" and len(node.args) == 3:
                    yield self.replace("mask removed", node, self.text(node.args[1]))
            elif isinstance(node, ast.For):
                yield from self.wrong_bound(node)
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and not self.is_addressing(node):
                yield from self.dropped_terms(node.value)

    def without_mask(self, call: ast.Call) -> Iterator[Mutant]:
        kept = [self.text(arg) for arg in call.args]
        kept += [f"{k.arg}={self.text(k.value)}" for k in call.keywords if k.arg not in ("mask", "other")]
        if any(k.arg == "mask" for k in call.keywords):
            yield self.replace("mask removed", call, f"{self.text(call.func)}({', '.join(kept)})")

    def wrong_bound(self, loop: ast.For) -> Iterator[Mutant]:
        if _called(loop.iter) not in ("range", "static_range"):
            return
        args = loop.iter.args  # type: ignore[attr-defined]
        step = self.text(args[2]) if len(args) == 3 else "1"
        bound = args[0] if len(args) == 1 else args[1]
        yield self.replace("loop ends one step early", bound, f"({self.text(bound)}) - {step}")
        if len(args) > 1:
            yield self.replace("loop begins one step late", args[0], f"({self.text(args[0])}) + {step}")

    def is_addressing(self, node: ast.Assign | ast.AugAssign) -> bool:
        """Integer work: a dropped term there ends out of bounds, which says nothing about the comparison."""
        target = ast.unparse(node.target if isinstance(node, ast.AugAssign) else node.targets[0])
        names = ("ptr", "off", "mask", "cols", "rows", "start", "row", "col", "idx", "pid")
        return any(name in target.lower() for name in names) or any(
            _called(inner) in _ADDRESSING for inner in ast.walk(node.value)
        )

    def dropped_terms(self, value: ast.expr) -> Iterator[Mutant]:
        for node in ast.walk(value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
                yield self.replace("term dropped", node, f"({self.text(node.left)})")
                right = self.text(node.right)
                sign = "-" if isinstance(node.op, ast.Sub) else ""
                yield self.replace("term dropped", node, f"({sign}({right}))")

    # ---- the host's backward

    def of_backward(self, method: ast.FunctionDef) -> Iterator[Mutant]:
        body = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        indent = " " * body[0].col_offset
        for arg in method.args.args[1:]:
            first = self.text(body[0])
            ones = f"{arg.arg} = torch.ones_like({arg.arg})\n{indent}{first}"
            yield self.replace("upstream replaced by ones", body[0], ones)
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and _called(node) == "cdiv":
                up, block = (self.text(arg) for arg in node.args[:2])
                yield self.replace("tail tile skipped", node, f"max(({up}) // ({block}), 1)")
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                yield from self.of_return(node.value)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                yield self.transposed(node.value)

    def of_return(self, value: ast.Tuple) -> Iterator[Mutant]:
        real = [e for e in value.elts if not isinstance(e, (ast.Constant, ast.Starred))]
        for left, right in itertools.pairwise(real):
            texts = {id(left): self.text(right), id(right): self.text(left)}
            swapped = ", ".join(texts.get(id(e), self.text(e)) for e in value.elts)
            yield self.replace("two gradients swapped", value, swapped)
        for element in real:
            if isinstance(element, ast.Name):
                yield self.transposed(element)

    def transposed(self, element: ast.Name) -> Mutant:
        name = element.id
        return self.replace("transposed", element, f"{name}.transpose(-1, -2).reshape({name}.shape)")
