"""Operation facts: what a pair's kernels cost, as far as a machine without a GPU can know.

Bytes, atomics and programs are counted while the kernels are interpreted. Every launch of forward and
backward is specialised for the target, exactly as Triton would for these arguments, and lowered to the source
of its kernel (specialised.py, compiled.py). The daemon has the sources compiled in processes of their own and
fills in registers, spills, shared memory and instructions.

Where the candidate itself runs compiled, this is also where somebody sees who accesses what: each case tells
its conduct, as operation candidate does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..certain import raised_by_every_call
from ..errors import wrap
from ..forward import Launch, launch_intercept, load
from ..specialised import Compiler
from . import candidate

# What is held against a candidate (agent/core/conduct.c).
_CONDUCT = (
    "modified", "aliases", "kernels", "races", "untraced", "ordered_by_atomics", "unnamed",
    "torch_ops_forward", "torch_ops_backward", "launches_backward",
    "launches_forward", "same", "prepared",
)  # fmt: skip


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op facts."""
    fwd = load(
        request["file"],
        "interpret",
        request.get("target") or "sm_90",
        "cpu",
        function=request.get("function"),
    )
    entry = candidate.entry_of(fwd, request.get("entry"))
    compiler = Compiler(fwd.target.triton) if request.get("compile") else None
    cases = []
    for case in request["cases"]:
        one = candidate.Case(fwd, entry, {**case, "facts": True}, request.get("dtype"))
        told = _case(one, scratch, compiler)
        if not request.get("conduct"):
            told.pop("conduct", None)
        cases.append({"id": case["id"], "ok": True, **told})
    return {"cases": cases}


def _case(case: candidate.Case, scratch: Path, compiler: Compiler | None) -> dict[str, Any]:
    """What is known of one case. Where it cannot be run, the others go on: `raised_in` is `forward` if not
    even the plain stub runs here, `kernel` in a launch, else `host`: the candidate's own code raised; and
    `everywhere` says that every call would."""
    recorded: list[Launch] = []
    running = "forward"

    def record(launch: Launch) -> Any:
        nonlocal running
        recorded.append(launch)
        before, running = running, "forward" if running == "forward" else "kernel"
        made = launch.run()
        running = before
        return made

    try:
        with launch_intercept(record):
            case.stub = case.call_stub()
            running = "host"
            result = case.run(scratch)
        running = "kernel"
        (scratch / result["file"]).unlink()
        plain = len(recorded) - result["launches_forward"] - result["launches_backward"]
        kernels = [] if compiler is None else _kernels(compiler, recorded[plain:], result["launches_forward"])
    except Exception as exc:  # noqa: BLE001 (any exception of the user's code)
        error = wrap("candidate_raised", "", exc, [case.fwd.path])
        everywhere = running != "forward" and raised_by_every_call(exc, case.fwd.path)
        return {"ok": False, "raised_in": running, "everywhere": everywhere, "error": error.to_dict()}
    conduct = {name: result[name] for name in _CONDUCT if name in result}
    return {**result["facts"], "kernels": kernels, "conduct": conduct}


def _kernels(compiler: Compiler, launches: list[Launch], forward: int) -> list[dict[str, Any]]:
    """Each different kernel once, with the pass that launched it; the first `forward` are the forward's."""
    first = compiler.distinct(launches[:forward])
    known = {id(made) for made in first}
    others = [made for made in compiler.distinct(launches[forward:]) if id(made) not in known]
    whose = [("forward", made) for made in first] + [("backward", made) for made in others]
    return [{**made, "pass": which} for which, made in whose]
