"""Operation facts: what a pair's kernels cost, as far as a machine without a GPU can know.

Bytes, atomics and programs are counted while the kernels are interpreted. Every launch of forward and
backward is specialised for the target, exactly as Triton would for these arguments, and lowered to the source
of its kernel (specialised.py, compiled.py). The daemon has the sources compiled in processes of their own and
fills in registers, spills, shared memory and instructions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import wrap
from ..forward import Launch, launch_intercept, load
from ..specialised import Compiler
from . import candidate


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op facts."""
    fwd = load(request["file"], "interpret", request.get("target") or "sm_90", "cpu")
    entry = candidate.entry_of(fwd, request.get("entry"))
    compiler = Compiler(fwd.target.triton) if request.get("compile") else None
    cases = []
    for case in request["cases"]:
        try:
            result = _case(
                candidate.Case(fwd, entry, {**case, "facts": True}, request.get("dtype")), scratch, compiler
            )
        except Exception as exc:  # noqa: BLE001 (one case fails, the others go on)
            result = {"ok": False, "error": wrap("candidate_raised", "", exc, [fwd.path]).to_dict()}
        cases.append({"id": case["id"], "ok": True, **result})
    return {"cases": cases}


def _case(case: Any, scratch: Path, compiler: Compiler | None) -> dict[str, Any]:
    recorded: list[Launch] = []

    def record(launch: Launch) -> Any:
        recorded.append(launch)
        return launch.run()

    with launch_intercept(record):
        result = case.run(scratch)
    (scratch / result["file"]).unlink()
    plain = len(recorded) - result["launches_forward"] - result["launches_backward"]
    kernels = [] if compiler is None else _kernels(compiler, recorded[plain:], result["launches_forward"])
    return {**result["facts"], "kernels": kernels}


def _kernels(compiler: Compiler, launches: list[Launch], forward: int) -> list[dict[str, Any]]:
    """Each different kernel once, with the pass that launched it; the first `forward` are the forward's."""
    first = compiler.distinct(launches[:forward])
    known = {id(made) for made in first}
    others = [made for made in compiler.distinct(launches[forward:]) if id(made) not in known]
    whose = [("forward", made) for made in first] + [("backward", made) for made in others]
    return [{**made, "pass": which} for which, made in whose]
