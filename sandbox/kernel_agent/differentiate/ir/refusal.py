"""Refusals: what cannot be differentiated rightly is named, with place and remedy; nothing is skipped."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from pathlib import Path

ANY = "Write it with functions that have an adjoint, or register one with kernel_agent.differentiate.rule()."
REMEDIES = {  # of constructs that have one remedy wherever they are met
    "associative_scan": "Scan one or two values at a time.",
    "assignment target": "Assign to a name; tl.where chooses elements.",
    "atomic result": "Add in one kernel, and load the sum in another.",
    "attribute": "Use what triton.language has.",
    "bitcast": "Convert the values: x.to(dtype).",
    "branch-dependent pointer": "Load in each branch, and go on with what is loaded.",
    "branch-dependent value": "Assign or return it in both branches.",
    "broadcast": "Give both blocks one shape.",
    "call": "Pass the argument, or give it a default.",
    "comparison": "Write it with ==, and, or.",
    "constexpr": "Write a literal, or pass a tl.constexpr.",
    "dot": "Multiply and sum: tl.sum(a * b, axis).",
    "dtype": "Name a type, as tl.float32.",
    "flags of a scan": "Scan the flags once more, alone.",
    "indexing": "Take an element with tl.sum(tl.where(lane == index, x, 0.0), axis).",
    "load": "Begin the address with a pointer argument.",
    "loop else": "Write the else branch after the loop.",
    "loop target": "Count with one name.",
    "make_block_ptr": "Begin the address with a pointer argument.",
    "match": "Write if and elif.",
    "matmult": "Use tl.dot.",
    "name": "Define it in the kernel or the file, or pass it.",
    "pointer arithmetic": "Add the offset to the pointer.",
    "pointer cast": "Load, and convert the values.",
    "raise": "Raise in the stub, before the launch.",
    "recursion": "Write a loop.",
    "return in a loop": "Return before or after the loop.",
    "starred call": "Write every argument.",
    "store": "Begin the address with a pointer argument.",
    "try": "Write its body alone.",
    **dict.fromkeys(
        ("tl.atomic_cas", "tl.atomic_xchg", "tl.atomic_max", "tl.atomic_min"),
        "Store what each program has in a place of its own, and combine that with torch or another kernel.",
    ),
    "unpacking": "Unpack a tuple of this length.",
}


@dataclass
class Refusal(Exception):
    """A construct that has no adjoint here: where it stands, what it is, and what to do about it."""

    construct: str
    message: str
    remedy: str = ""  # empty: that of the construct
    line: int | None = None
    column: int | None = None
    file: str | None = None
    fold: int | None = None  # the line of a condition whose branch that no traced launch takes is the matter

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.remedy = self.remedy or REMEDIES.get(self.construct, ANY)

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

    def seen_from(self, file: str, line: int) -> Refusal:
        """What stands in a module that `file` imports is told at a line of `file`."""
        if self.file not in (None, file):
            self.message = f"{Path(self.file or '').name}:{self.line or '?'}: {self.message}"
            self.file, self.line, self.column = file, line, 0
        return self
