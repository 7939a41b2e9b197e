"""What a generated kernel says about itself: assumptions, decisions, and schedules that it does not take.

A `# SCHEDULE:` line stands where a gradient stays atomic. It says which proof failed and where, and what an
expert would try instead: that is a place for a person or a model, since nothing here may guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import readable
from ..ir.names import adjoint_name
from ..ir.nodes import GradWrite, Node
from ..ir.report import LineReport, Why
from ..reverse.sweep import Reverse

# Kind of failure: (what it is called, what an expert would try).
MOVES = {
    "data": (
        "data-dependent index",
        "sort or invert the index before the launch, and give all entries with one destination to one "
        "program; keep atomics "
        "where collisions are rare",
    ),
    "mixed": (
        "not affine in one variable a dimension",
        "turn the window around: one program a tile of the gradient, looping over the taps and gathering "
        "the upstream",
    ),
    "carry": (
        "carried state",
        "give each tile of the gradient to one program with a table of tiles made on the host, so that no "
        "state is walked",
    ),
    "reverse": (
        "a loop that runs backwards",
        "split the channels among programs, never the steps; or a chunked scan whose chunk sums are "
        "combined afterwards",
    ),
    "inner": (
        "value of an inner loop",
        "have the main kernel store that value, and write this gradient from a kernel of its own",
    ),
    "lanes": (
        "several lanes share an address",
        "sum the block over the lanes that share an address before the write",
    ),
    "several": (
        "several writes",
        "make one write of them: tl.where over the lanes that both reach",
    ),
    "fold": (
        "data-dependent index",
        "fold the element into the write of its block with tl.where(lanes == index, ...), if the index "
        "stays in the tile",
    ),
    "extent": (
        "unknown extent",
        "pass the sizes of the tensor, and mask by them, so that rows provably do not overlap",
    ),
    "grid": ("too many grid axes", "fold two of the owned axes into one program id"),
    "bounds": (
        "loop bounds",
        "bound the loop by arguments, or pad it to a length that is the same for all programs, and mask",
    ),
    "table": (
        "pointers from a table",
        "give each operand a kernel of its own over a list of tiles that the host makes, and sum in "
        "registers",
    ),
    "asked": ("asked for", "the schedules `owner` and `partials` prove more"),
    "inplace": (
        "in-place access",
        "write the result to a buffer of its own",
    ),
    "overlap": (
        "overlapping windows",
        "one program a tile of the gradient, looping over the windows that reach it",
    ),
    "shared": ("shared tile", "private partial sums: a few programs walk the summed axis, a second kernel adds their rows"),
}  # fmt: skip


def advise(reverse: Reverse, found: list[GradWrite], refused: dict[Node, str], asked: bool) -> None:
    """Attach the advice to every write that is still atomic, and report it."""
    for write in found:
        if write.kind != "atomic_add":
            continue
        why = refused.get(write.base)
        if why is None:
            why = Why("asked", "the atomic schedule was asked for") if asked else Why("shared", write.proof)
        name, move = MOVES[getattr(why, "kind", "shared")]
        store = f"no plain store, because {write.proof}; " if write.proof and write.proof != why else ""
        d = adjoint_name(write.base.attrs["name"])
        write.advice = f"{d} stays atomic: {store}no owner ({name}): {why}. An expert would try: {move}."
        reverse.report.append(LineReport(write.line, "schedule", name, write.advice))


@dataclass
class Totals:
    """What the backward of one launch costs beside its arithmetic, for the traced call."""

    tape: int = 0
    naive: int = 0
    kept: int = 0
    atomics: int = 0

    @property
    def proven(self) -> int:
        """How many gradient writes need no atomic add."""
        return self.atomics - self.kept

    def line(self) -> str:
        return (
            f"tape: {readable(self.tape, 'B', 2)} (naive {readable(self.naive, 'B', 2)}) · "
            f"atomics kept {self.kept} of {self.atomics} · refused 0"
        )


_SILENT = {"atomic", "schedule", "spill"}


TIES = {
    "maximum": "a tie of maximum gives the gradient to the second operand",
    "minimum": "a tie of minimum gives the gradient to the second operand",
    "max": "a tie in a block maximum gives the gradient to the first equal element",
    "min": "a tie in a block minimum gives the gradient to the first equal element",
    "clamp": "clamp passes the gradient at both bounds",
    "abs": "abs has the derivative 0 at 0",
}


def header(reverse: Reverse, totals: Totals, checks: list[str]) -> list[str]:
    """The lines above the main kernel of a launch. `checks`: what the host asks of strides before it."""
    lines = [totals.line(), *(text for name, text in TIES.items() if name in reverse.used)]
    seen: dict[tuple[int | None, str], list[str]] = {}
    for r in reverse.report:
        if r.kind in _SILENT or (r.kind in ("owner", "partials") and r.proof == "none"):
            continue
        what, _, reason = r.reason.partition(": ") if r.reason.startswith("`") else ("", "", r.reason)
        names = seen.setdefault((r.line, reason), [])
        if what and what not in names:
            names.append(what)
    for (line, reason), names in seen.items():
        where = f"line {line}: " if line else ""
        lines.append(f"{where}{', '.join(names)}{': ' if names else ''}{reason}")
    for check in checks:
        passed = f"the strides pass {check}," if check.startswith("disjoint(") else f"{check} holds, which is"
        lines.append(f"no two programs meet while {passed} asked before the launch")
    return [*lines, "upstream gradients are laid out like the outputs they belong to"]
