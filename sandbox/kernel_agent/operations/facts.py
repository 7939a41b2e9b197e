"""Operation facts: what a pair's kernels cost, as far as a machine without a GPU can know.

Bytes, atomics and programs are counted while the kernels are interpreted. Every launch of forward and backward is specialised
for the target, exactly as Triton would for these arguments, and lowered to the source of its kernel (compiled.py). The
daemon has the sources compiled in processes of their own and fills in registers, spills, shared memory and instructions.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from .. import compiled, interpret
from ..errors import Unusable, describe, wrap
from ..forward import Launch, launch_intercept, load


class Traffic(TorchDispatchMode):
    """Adds the bytes that torch operations read and write to a counter; views and allocations move none."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self.counter.launching or name in _ALLOCATIONS:
            return result
        values = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | (kwargs or {})
        changed = {
            a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        }
        if not changed and any(r.alias_info is not None for r in func._schema.returns):
            return result  # a view
        for argument, value in values.items():
            asked = name.startswith("new_") or name.endswith("_like")  # its shape and type, not its contents
            unread = asked or (argument in changed and name in _OVERWRITING)
            self.counter.bytes_read += 0 if unread else _bytes(value)
            self.counter.bytes_written += _bytes(value) if argument in changed else 0
        self.counter.bytes_written += 0 if changed else _bytes(result)
        return result


_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_local_scalar_dense",
}
_OVERWRITING = {"zero_", "fill_", "copy_", "set_"}


def _bytes(value: Any) -> int:
    """Memory of the tensors in a value: an element that several indices share counts once."""
    if isinstance(value, torch.Tensor):
        count = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            count *= size if stride or not size else 1
        return count * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


@dataclass
class Counter:
    """Counts what interpreted launches, and the torch operations around them, do while it is entered.

    Bytes of launches are those of active lanes.
    """

    enabled: bool = True
    launches: int = 0
    programs: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0
    launching: bool = False

    def load(self, addresses: np.ndarray, size: int) -> None:
        self.bytes_read += addresses.size * size

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.bytes_written += addresses.size * size

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        self.atomics += addresses.size
        self.bytes_read += addresses.size * size
        self.bytes_written += addresses.size * size

    def _launched(self, launch: Launch) -> Any:
        self.launches += 1
        self.programs += launch.programs
        before, self.launching = self.launching, True
        try:
            return launch.run()
        finally:
            self.launching = before

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        if self.enabled:
            self._stack.enter_context(interpret.observe(self))
            self._stack.enter_context(launch_intercept(self._launched))
            self._stack.enter_context(Traffic(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def to_dict(self) -> dict[str, int]:
        return {
            "launches": self.launches,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "atomics": self.atomics,
            "programs": self.programs,
        }


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op facts."""
    from . import candidate  # which counts with this module's Counter

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
    kernels = [] if compiler is None else compiler.distinct(recorded[plain:])
    return {**result["facts"], "kernels": kernels}


class Compiler:
    """Specialises launches for a target without a GPU; each distinct specialisation once."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.backend: BaseBackend = make_backend(target)
        self._known: dict[str, dict[str, Any]] = {}

    def distinct(self, launches: list[Launch]) -> list[dict[str, Any]]:
        """Every specialisation among `launches`, in order of first launch, with the key of its source in `compile`."""
        found: dict[str, dict[str, Any]] = {}
        for launch in launches:
            source, options = self.specialise(launch)
            key = f"{launch.name} {source.signature} {source.constants} {source.attrs} {options}"
            if key not in self._known:
                self._known[key] = self._describe(launch, source, options)
            found[key] = self._known[key]
        return list(found.values())

    def specialise(self, launch: Launch) -> tuple[ASTSource, Any]:
        """Signature, constants and alignment attributes as Triton's launcher derives them from the arguments."""
        kernel = launch.kernel
        options = {
            **launch.options,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "num_ctas": launch.num_ctas,
        }
        binder = triton.runtime.jit.create_function_from_signature(
            kernel.signature, kernel.params, self.backend
        )
        bound, specialization, _ = binder(**launch.args)
        parsed, signature, constants, attrs = kernel._pack_args(
            self.backend, dict(options), bound, specialization, None
        )
        return ASTSource(kernel, signature, constants, attrs), parsed

    def entry(self, launch: Launch) -> dict[str, Any]:
        """The compiled kernel of a launch: compiled.build's entry. Raises Unusable."""
        source, options = self.specialise(launch)
        try:
            lowered = compiled.lower(source, self.backend, self.target, options)
            if lowered is not None:
                return compiled.obtain(lowered)
            whole = triton.compile(source, target=self.target, options=options.__dict__)
        except Exception as exc:  # whatever the compiler raises is the finding
            raise compile_error(exc, launch.kernel) from exc
        return {"facts": compiled.binary_facts(whole.asm["cubin"], whole.metadata.shared)}

    def _describe(self, launch: Launch, source: ASTSource, options: Any) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": launch.name,
            "constexprs": {name: _plain(launch.args[name]) for name in launch.constexprs},
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "registers": None,
            "spills": None,
            "shared": None,
            "instructions": None,
            "ok": False,
        }
        try:
            lowered = compiled.lower(source, self.backend, self.target, options)
            if lowered is None:  # not to be shared: compiled here
                return {**facts, "ok": True, **self.entry(launch)["facts"]}
        except Exception as exc:  # noqa: BLE001 (whatever the compiler raises is the finding)
            error = exc if isinstance(exc, Unusable) else compile_error(exc, launch.kernel)
            return {**facts, "error": error.to_dict()}
        compiled.note(lowered)
        return {**facts, "compile": lowered.key}


class Warmed:
    """Stands in for a compiled kernel where there is no GPU: its resources for the target, and a way to launch it."""

    def __init__(self, launch: Launch, compiler: Compiler) -> None:
        facts = compiler.entry(launch)["facts"]
        self._launch = launch
        self.n_regs: int = facts["registers"]
        self.n_spills: int = facts["spills"]
        self.n_max_threads = 32 * launch.num_warps
        self.metadata = types.SimpleNamespace(
            name=launch.name,
            shared=facts["shared"],
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            num_ctas=launch.num_ctas,
        )
        self.shared: int = facts["shared"]

    def _init_handles(self) -> None:
        """On a GPU this loads the binary; here everything is known already."""

    def __getitem__(self, grid: Any) -> Any:
        kernel = self._launch.kernel
        options = {
            name: getattr(self._launch, name)
            for name in ("num_warps", "num_stages", "num_ctas")
            if name not in kernel.signature.parameters
        }

        def launch(*args: Any, **kwargs: Any) -> Any:
            return kernel.run(*args, grid=grid, warmup=False, **(options | kwargs))

        return launch

    def __str__(self) -> str:
        return f"{self.n_regs} registers, {self.n_spills} bytes spilled, {self.shared} bytes shared"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def compile_error(exc: Exception, kernel: JITFunction) -> Unusable:
    """A failed compilation as a finding with the line of the user's file."""
    file = kernel.fn.__code__.co_filename
    line = column = None
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, CompilationError) and inner.node is not None:
            line = kernel.starting_line_number + _offset(kernel) + inner.node.lineno - 1
            column = inner.node.col_offset + 1
            exc = inner
        inner = inner.__cause__
    message = exc.error_message if isinstance(exc, CompilationError) and exc.error_message else describe(exc)
    return Unusable("unsupported_op", f"{kernel.fn.__name__} does not compile: {message}", file, line, column)


def _offset(kernel: JITFunction) -> int:
    """Lines of decorators before `def`: Triton counts from the `def`."""
    for at, text in enumerate(kernel.raw_src):
        if text.lstrip().startswith("def "):
            return at
    return 0
