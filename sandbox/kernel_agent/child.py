"""One request, one operation, one result: `python -m kernel_agent.child SCRATCH` (docs/protocol.md).

The exit code is 0 when result.json was written, also when it reports an error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .errors import Unusable, describe, filtered_traceback

_OPERATIONS = {
    "bench": "kernel_agent.operations.benchmark",
    "ceilings": "kernel_agent.operations.ceilings",
    "compile": "kernel_agent.compiled",
    "inspect": "kernel_agent.operations.inspect",
    "oracle": "kernel_agent.operations.oracle",
    "candidate": "kernel_agent.operations.candidate",
    "scan": "kernel_agent.operations.scan",
    "facts": "kernel_agent.operations.facts",
    "sanitize": "kernel_agent.operations.sanitize",
    "differentiate": "kernel_agent.differentiate.operation",
}
_COMPILING = ("bench", "candidate", "differentiate", "facts", "oracle")
_NEEDED = ("torch", "triton", "numpy")
_HERE = str(Path(__file__).parents[1])
_STARTED_IN = os.getcwd()
_Operation = Callable[[dict[str, Any], Path], dict[str, Any]]


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m kernel_agent.child SCRATCH", file=sys.stderr)
        return 2
    scratch = Path(argv[1])
    started = time.monotonic()
    result: dict[str, Any] = {"op": None, "nonce": None}
    try:
        request = json.loads((scratch / "request.json").read_text())
        result.update(op=request.get("op"), nonce=request.get("nonce"))
        if request.get("op") == "candidate" and not request.get("plain"):
            result.update(_apart(request, scratch, result))
        else:
            result.update(_answer(request, scratch, result))
    except BaseException as exc:  # noqa: BLE001
        result.update(ok=False, error=_error(exc, result).to_dict())
    result["seconds"] = round(time.monotonic() - started, 6)
    return _write(scratch / "result.json", result)


def _answer(request: dict[str, Any], scratch: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What the operation returned, or why it did not."""
    try:
        return {"ok": True, **_run(request, scratch)}
    except BaseException as exc:  # noqa: BLE001 (also SystemExit out of the user's code)
        return {"ok": False, "error": _error(exc, asked).to_dict(), **getattr(exc, "extra", {})}


def _apart(request: dict[str, Any], scratch: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The same of a candidate, which runs in a process of its own; of its torch operations this one has a
    record that it cannot change."""
    witness = importlib.import_module("kernel_agent.witness")
    result, record = witness.apart(lambda: _answer(request, scratch, asked))
    importlib.import_module("kernel_agent.operations.candidate").hold_against(result, record, request)
    return dict(result)


def _find_modules(folder: str | None) -> None:
    """The user's modules are found in their copies, behind all that is installed, and not in the folder in
    which the program was started, nor where `pip install -e` left them: nothing there may be read."""
    sys.path[:] = [
        path for path in sys.path if path == _HERE or (path not in ("", _STARTED_IN) and _may_read(path))
    ]
    if folder:
        sys.path.append(folder)


def _may_read(path: str) -> bool:
    """Whether this process may look into a folder of the path, if it is one."""
    try:
        os.scandir(path).close()
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The operation, and what it took from the shared cache of compiled kernels or misses there."""
    operation = _operation(request)
    _find_modules(request.get("modules"))
    if request["op"] == "oracle" and str(request.get("device")).startswith("cuda"):
        return {"context_seconds": _open_gpu(), **_compiling(operation, request, scratch)}
    if request["op"] not in _COMPILING:
        return operation(request, scratch)
    return _compiling(operation, request, scratch)


def _open_gpu() -> float:
    """Seconds to a context of CUDA. One process gets one in a tenth of a second; many that want one at the
    same time get theirs one after another, from a driver that all programs of the machine share."""
    torch = importlib.import_module("torch")
    started = time.monotonic()
    with contextlib.suppress(Exception):  # the operation says what is wrong
        torch.cuda.synchronize()
    return round(time.monotonic() - started, 6)


def _compiling(operation: _Operation, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    compiled = importlib.import_module("kernel_agent.compiled")
    compiled.use(request.get("compiled"))
    if request.get("compiled"):
        compiled.install()
    result = operation(request, scratch)
    cache = compiled.leave(scratch)
    return {**result, "cache": cache} if cache else result


def _operation(request: dict[str, Any]) -> _Operation:
    name = _OPERATIONS.get(request.get("op", ""))
    if name is None:
        raise Unusable("internal", f"unknown operation {request.get('op')!r}")
    return importlib.import_module(name).run


def _error(exc: BaseException, result: dict[str, Any]) -> Unusable:
    """What ended an operation; memory that had run out is had again when others are through."""
    error = _told(exc, result)
    if "torch" in sys.modules:
        budget = importlib.import_module("kernel_agent.operations.budget")
        error.out_of_memory = error.out_of_memory or budget.out_of_memory(exc) is not None
    return error


def _told(exc: BaseException, result: dict[str, Any]) -> Unusable:
    if isinstance(exc, Unusable):
        return exc
    if isinstance(exc, ModuleNotFoundError) and exc.name in _NEEDED:
        message = f"{sys.executable} has no module {exc.name}"
        return Unusable(
            "internal", message, remedy="name a Python with torch, triton and numpy: --python PATH"
        )
    error = Unusable("internal", f"{result['op'] or 'request'}: {describe(exc)}")
    own = [str(path) for path in Path(__file__).parent.rglob("*.py")]
    error.traceback = filtered_traceback(exc, own)
    return error


def _write(path: Path, result: dict[str, Any]) -> int:
    """Write beside, then rename: a reader never sees half a result."""
    part = path.with_suffix(".json.part")
    try:
        part.write_text(json.dumps(result, allow_nan=False, default=str))
        os.replace(part, path)
    except (OSError, ValueError) as exc:
        print(f"result.json could not be written: {exc}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    return 0


def end(code: int) -> NoReturn:
    """End this process now, without taking the interpreter and the native libraries apart: a thread of
    autograd's that asks for the interpreter's lock meanwhile aborts the process, and with it a result that is
    whole."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever the user's code has put there
            stream.flush()
    os._exit(code)


def is_watched(argv: list[str]) -> bool:
    """Whether compute-sanitizer runs this process: it reports as the process ends in order."""
    try:
        return bool(json.loads((Path(argv[1]) / "request.json").read_text()).get("plain"))
    except (OSError, ValueError, AttributeError, IndexError):
        return False


if __name__ == "__main__":
    exit_code = main(sys.argv)
    if is_watched(sys.argv):
        sys.exit(exit_code)
    end(exit_code)
