"""Operation `differentiate` of the child protocol."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from .. import errors, forward
from .ir.refusal import Refusal
from .pipeline import differentiate


class Refused(errors.Unusable):
    """A refusal with its list, as docs/protocol.md wants it."""

    def __init__(self, refusals: list[Refusal]) -> None:
        first = refusals[0]
        message = f"{first.construct}: {first.message}"
        super().__init__("unsupported_op", message, first.file, first.line, first.column, first.remedy)
        keys = ("line", "column", "construct", "message", "remedy")
        self.extra = {"refusals": [{k: r.as_dict()[k] for k in keys} for r in refusals]}


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The backward section for one case. Raises errors.Unusable; a refusal carries `refusals`."""
    del scratch
    fwd = forward.load(
        request["file"],
        mode="cuda" if request.get("device") == "cuda" else "interpret",
        target=request.get("target") or "sm_90",
        device=request.get("device") or "cpu",
    )
    case = request["case"]
    chosen = {name: request.get(name) for name in ("dtype", "schedule", "config")}
    others = case.get("others") or ()
    try:
        draft = differentiate(fwd, case["dims"], case["seed"], **chosen, others=others)
    except Refusal as refusal:
        raise Refused([refusal.at(None, fwd.path)]) from None
    ast.parse(draft.text)
    lines = [{"line": r.line, "class": r.kind, "proof": r.proof, "reason": r.reason} for r in draft.report]
    counts = ("tape_bytes", "tape_naive_bytes", "atomics", "atomics_naive")
    report = {
        **{name: getattr(draft, name) for name in counts},
        "lines": lines,
        "schedule": draft.schedule,
        "rounded": draft.rounded,
        "configs": draft.configs,
        "alternatives": draft.alternatives,
    }
    return {"backward": draft.text, "entry": draft.entry, "report": report}


__all__ = ["Refused", "run"]
