"""Launches specialised for a target, without a GPU: what Triton would compile, and what comes of it."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from . import compiled
from .errors import Unusable, describe

if TYPE_CHECKING:
    from .launches import Launch


class Compiler:
    """Specialises launches for a target without a GPU; each distinct specialisation once."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.backend: BaseBackend = make_backend(target)
        self._known: dict[str, dict[str, Any]] = {}

    def distinct(self, launches: list[Launch]) -> list[dict[str, Any]]:
        """Every specialisation among `launches`, in order of first launch, with the key of its source in
        `compile`."""
        found: dict[str, dict[str, Any]] = {}
        for launch in launches:
            source, options = self.specialise(launch)
            key = f"{launch.name} {source.signature} {source.constants} {source.attrs} {options}"
            if key not in self._known:
                self._known[key] = self._describe(launch, source, options)
            found[key] = self._known[key]
        return list(found.values())

    def specialise(self, launch: Launch) -> tuple[ASTSource, Any]:
        """Signature, constants and alignment attributes, as Triton's launcher derives them."""
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
    """Stands in for a compiled kernel where there is no GPU: its resources, and a way to launch it."""

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
