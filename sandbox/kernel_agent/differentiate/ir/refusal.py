"""Refusals: whatever cannot be differentiated rightly is named, with its place and a remedy. Nothing is
skipped in silence."""

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
