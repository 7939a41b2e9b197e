"""Operation facts: what a pair's kernels cost, as far as a machine without a GPU can know.

Bytes, atomics and programs are counted while the kernels are interpreted. Every launch of forward and
backward is specialised for the target, exactly as Triton would for these arguments, and lowered to the source
of its kernel (specialised.py, compiled.py). The daemon has the sources compiled in processes of their own and
fills in registers, spills, shared memory and instructions.

Where the candidate itself runs compiled, this is also where somebody sees who accesses what: each case tells
its conduct, as operation candidate does.

Cases are small where kernels are interpreted. What a block size of the user's own shape costs is read off its
launches alone: the host's code runs with tensors that have no memory, and no kernel does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import devices, draw
from ..certain import raised_by_every_call
from ..errors import wrap
from ..forward import Forward, Launch, launch_intercept, load
from ..source import words
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
    real: list[Launch] = []
    for dims in (request.get("real") or []) if compiler else []:
        real += _launches_of(fwd, entry, dims, request.get("dtype"))
    kernels = [{**made, "pass": "backward"} for made in compiler.distinct(real)] if compiler else []
    widest = max((math.prod(launch.grid) for launch in real), default=None)
    return {"cases": cases, "kernels": kernels, "widest": widest}


class _WithoutMemory(TorchFunctionMode):
    """Tensors that the user's code makes have a shape and no values, wherever it wants them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        told = dict(kwargs or {})
        if told.get("device") is not None:
            told["device"] = "meta"
        return func(
            *(
                "meta" if isinstance(a, torch.device) or (isinstance(a, str) and a == "cpu") else a
                for a in args
            ),
            **told,
        )


class _Symbols(ModuleType):
    """Stands in for torch's module of symbolic shapes, which imports sympy: what is asked about plain truths
    and numbers is answered here, and for any other question the module is imported after all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_asked, name) if name in _ANSWERED else getattr(_symbols(), name)


_TRUTHS = words("expect_true guard_or_false guard_or_true guard_size_oblivious statically_known_true")
_ANSWERED = (*_TRUTHS, "is_nested_int", "sym_eq")


def _asked(name: str, *of: Any, **rest: Any) -> Any:
    if name in _TRUTHS and type(of[0]) is bool:
        return of[0]
    if name == "is_nested_int" and type(of[0]) is int:
        return False
    if name == "sym_eq" and all(isinstance(o, (list, tuple)) and {int}.issuperset(map(type, o)) for o in of):
        return list(of[0]) == list(of[1])
    return getattr(_symbols(), name)(*of, **rest)


_SYMBOLS = "torch.fx.experimental.symbolic_shapes"


def _symbols() -> ModuleType:
    """The module itself, in whose place nothing stands from then on."""
    if isinstance(sys.modules.get(_SYMBOLS), _Symbols):
        del sys.modules[_SYMBOLS]
    return importlib.import_module(_SYMBOLS)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Operations on tensors without memory are functions in Python. Each asks torch's compiler, when it is
    first called, to leave it alone, and some look at symbols that shapes may have. Importing those takes a
    third of a second to two, and nobody compiles here."""
    before = {name: sys.modules.get(name) for name in ("torch._dynamo", _SYMBOLS)}
    if before["torch._dynamo"] is None:
        compiler = ModuleType("torch._dynamo")
        compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
        sys.modules["torch._dynamo"] = torch._dynamo = compiler
    if before[_SYMBOLS] is None:
        sys.modules[_SYMBOLS] = _Symbols(_SYMBOLS)
    try:
        yield
    finally:
        if before["torch._dynamo"] is None:
            del sys.modules["torch._dynamo"], torch._dynamo
        if isinstance(sys.modules.get(_SYMBOLS), _Symbols):
            del sys.modules[_SYMBOLS]


def _launches_of(fwd: Forward, entry: Any, dims: dict[str, Any], dtype: str | None) -> list[Launch]:
    """The launches of a backward on sizes that nothing here could compute, as far as its host's code gets
    without values: none where shapes hang on them."""
    launches: list[Launch] = []
    with (
        contextlib.suppress(Exception),
        _without_compiler(),
        _WithoutMemory(),
        torch.device("meta"),
        launch_intercept(launches.append),
    ):
        args, kwargs = draw.make_inputs(fwd, dims, 0, device="meta", dtype=dtype)
        bound = fwd.signature.bind(*args, **kwargs)
        wanted = draw.grad_inputs(fwd, draw.bind(fwd, args, kwargs))
        leaves = {name: value.detach().requires_grad_() for name, value in wanted.items()}
        bound.arguments.update(leaves)
        with fwd.active():
            returned = entry(*bound.args, **bound.kwargs)
            launches.clear()
            outputs = [o for o in draw.flatten(returned) if isinstance(o, torch.Tensor) and o.requires_grad]
            devices.gradients(outputs, list(leaves.values()), [torch.empty_like(o) for o in outputs])
    return launches


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
