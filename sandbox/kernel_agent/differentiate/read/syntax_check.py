"""Refusals: whatever cannot be differentiated rightly is named, with its place and a remedy. Nothing is skipped in silence."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass


@dataclass
class Refusal(Exception):
    """A construct that has no adjoint here: where it stands, what it is, and what to do about it."""

    construct: str
    message: str
    remedy: str = "Rewrite the construct, or register an adjoint with kernel_agent.differentiate.rule()."
    line: int | None = None
    column: int | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.file or '?'}:{self.line or '?'}:{self.column or 0}: {self.construct}: {self.message}"

    def as_dict(self) -> dict:
        return asdict(self)

    def at(self, node: ast.AST | None, file: str | None = None) -> Refusal:
        """Fill in the place, unless an inner construct has already named a better one."""
        if self.line is None and node is not None:
            self.line, self.column = getattr(node, "lineno", None), getattr(node, "col_offset", None)
        self.file = self.file or file
        return self


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

_STATEMENTS = {
    ast.Break: "break",
    ast.Continue: "continue",
    ast.Try: "try",
    ast.With: "with",
    ast.Raise: "raise",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.FunctionDef: "nested function",
    ast.ClassDef: "class",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.Delete: "del",
    ast.Lambda: "lambda",
    ast.ListComp: "comprehension",
    ast.GeneratorExp: "comprehension",
    ast.Await: "await",
    ast.Yield: "yield",
}


def check(kernel: ast.FunctionDef) -> None:
    """Refuse the statements that no pass understands, before any pass runs."""
    for node in (inner for statement in kernel.body for inner in ast.walk(statement)):
        for kind, name in _STATEMENTS.items():
            if isinstance(node, kind):
                raise Refusal(name, f"`{name}` in a kernel is not supported").at(node)
        if isinstance(node, (ast.For, ast.While)) and node.orelse:
            raise Refusal("loop else", "the else branch of a loop is not supported").at(node)
