"""What the passes say of a kernel: a line of the report, and why a proof failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LineReport:
    """Why a line is handled as it is; printed for people and given to the LLM."""

    line: int | None
    kind: str
    proof: str
    reason: str


class Why(str):
    """The reason why a proof failed, with its kind, a key of MOVES."""

    kind: str

    def __new__(cls, kind: str, text: str) -> Why:
        why = super().__new__(cls, text)
        why.kind = kind
        return why
