"""What a candidate does, as it is seen from its own process: torch operations, launches, bytes that change.

Whatever is noted here can count only against the candidate, whose code runs beside it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from . import accesses, draw, tensors, vocabulary
from .flow import Flow, start_of, tensors_of
from .formulas import engine_may
from .forward import Launch
from .fresh_memory import poison
from .guards import Guards
from .launches import benchmarking
from .modes import Mode
from .source import words
from .summands import TOLD as SEVERAL

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_ADDS = frozenset({"aten::add", "aten::add_"})
# Honest of anybody, whatever the values (agent/core/conduct.c): not worth a look at them.
_MOVES = words(
    "clone _to_copy copy_ cat stack sum fill_ zero_ constant_pad_nd flip repeat index index_select"
)
_SAME = 0.02  # two ways to compute one thing in half precision are nearer
NOT_THE_CANDIDATES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_TRITON = str(Path(triton.__file__).parent)
_FILLED = frozenset(
    {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like"}
)


class Poison(Mode):
    """Fills fresh uninitialised memory, and counts torch operations on floating tensors in the phase
    `counting`.

    Operations on indices are not counted, unless they come from the upstream, nor what an autotuner does to
    measure. What runs inside a launch is counted.
    """

    def __init__(
        self,
        guards: Guards | None = None,
        plain: bool = False,
        flow: Flow | None = None,
        memory: str = "nan",
    ) -> None:
        """`memory`: what fresh memory holds, a row of MEMORY."""
        super().__init__()
        self.flow = flow
        self.plain = plain
        self.memory = memory
        self.guards = guards
        self.counting: str | None = None
        self.counts: dict[str, dict[str, int]] = {"stub": {}, "forward": {}, "backward": {}}
        self.values: dict[str, list[Computed]] = {"stub": [], "forward": [], "backward": []}
        self.stub_operations: frozenset[str] = frozenset()  # those of the stub that autograd differentiates
        self.hanging: Hanging | None = None  # while the stub runs
        self.differentiates: types.CodeType | None = None  # the function that calls autograd's engine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if self.hanging is not None:
            self.hanging.operation(name, (args, kwargs or {}), result)
        reached = self.flow.operation(func, args, kwargs or {}, result) if self.flow is not None else None
        if (
            self.counting
            and not (benchmarking() and _by_tuner())
            and (reached is not None or _computes(name, args, result))
            and not (self._engine_may(name, reached) and _by_engine(self.differentiates))
        ):
            self.count(reached or name)
            if self.counting != "backward" and _makes_values(func):
                self.values[self.counting] += Computed.of(name, result, (args, kwargs or {}))
        operation = name.removeprefix("aten::")
        if self.guards is not None and operation in _ALLOCATIONS | _FILLED and not benchmarking():
            result = self.guards.allocate(result, filled=operation in _FILLED)
        if operation in _ALLOCATIONS and not self.plain:
            poison(result, self.memory)
        return result

    def _engine_may(self, name: str, reached: str | None) -> bool:
        """A sum of one number several times is a product, whoever makes it; but where the stub adds, it may
        add something to itself."""
        multiplies = reached == SEVERAL and not (name in _ADDS and _ADDS & self.stub_operations)
        return name in engine_may(self.stub_operations) and not multiplies

    def count(self, name: str) -> None:
        if self.counting:
            counts = self.counts[self.counting]
            counts[name] = counts.get(name, 0) + 1

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """The same of a method that no dispatcher sees."""
        if self.flow is not None and self.flow.matters(tensor):
            self.count(name)


class Hanging:
    """While the stub runs: the storages that hang on inputs that want gradients, and the torch operations
    that autograd would differentiate therefore. Whatever a launch is given beside such may hang on them after
    it."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self.operations: set[str] = set()
        self._starts: set[int] = set()
        self._all = False  # a table of addresses may have led anywhere
        self._kept: list[torch.Tensor] = []
        self._add(list(inputs))

    def operation(self, name: str, given: Any, result: Any) -> None:
        if self._all or any(start_of(tensor) in self._starts for tensor in tensors_of(given)):
            self.operations.add(name)
            self._add(list(tensors_of(result)))

    def launched(self, launch: Launch) -> None:
        given = list(accesses.tensors_in(launch.args.values()))
        self._all = self._all or accesses.holds_addresses(given)
        if any(start_of(tensor) in self._starts for tensor in given):
            self._add(given)

    def _add(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if start_of(tensor) not in self._starts:
                self._starts.add(start_of(tensor))
                self._kept.append(tensor)


@dataclass(frozen=True)
class Computed:
    """What an operation made, and of what: its name, the result's shape, and two sums that tell values apart,
    of the result and of each operand."""

    name: str
    shape: tuple[int, ...]
    sums: tuple[float, float]
    of_what: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(name: str, result: Any, given: Any = ()) -> list[Computed]:
        values = _floating(result)
        if not values:
            return []
        operands = sorted(_sums(value) for value in _floating(given))
        return [Computed(name, tuple(values[0].shape), _sums(values[0]), tuple(operands))]

    def is_like(self, other: Computed) -> bool:
        """Also where kernels that round otherwise made what it was computed from."""
        alike = (self.name, self.shape) == (other.name, other.shape) and _near(self.sums, other.sums)
        if not alike or len(self.of_what) != len(other.of_what):
            return False
        left = list(other.of_what)
        for sums in self.of_what:
            same = next((at for at, theirs in enumerate(left) if _near(sums, theirs)), None)
            if same is None:
                return False
            del left[same]
        return True


def _floating(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def _sums(value: torch.Tensor) -> tuple[float, float]:
    flat = value.detach().double().nan_to_num(1.0, 2.0, 3.0).reshape(-1)
    weights = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device).cos()
    norm, mixed = torch.stack([flat.norm(), flat @ weights]).tolist()
    return norm, mixed


def _near(a: tuple[float, float], b: tuple[float, float]) -> bool:
    near = _SAME * max(a[0], b[0]) + 1e-30
    return abs(a[0] - b[0]) <= near and abs(a[1] - b[1]) <= near


def _makes_values(func: Any) -> bool:
    """Not a view, a copy or fresh memory."""
    name = func._schema.name.removeprefix("aten::")
    aliases = [r.alias_info for r in func._schema.returns]
    is_view = any(a is not None and not a.is_write for a in aliases)
    return not is_view and name not in _ALLOCATIONS | _FILLED | _MOVES


def _computes(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation makes floating values, or hands one to host code."""
    values = args if name == "aten::_local_scalar_dense" else draw.flatten(result)
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _by_engine(root: types.CodeType | None) -> bool:
    """Whether autograd's engine does this itself, as it adds up the gradients of a tensor that was used more
    than once.

    Then nothing but torch, and what this package hooks into it, stands between here and the call of the
    backward: a Function's backward has a frame.
    """
    # On a thread of the engine's there may be no frame but this one and the mode's.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not root:
        if not frame.f_code.co_filename.startswith(NOT_THE_CANDIDATES):
            return False
        frame = frame.f_back
    return True


def _by_tuner() -> bool:
    """Whether Triton does this itself, as it measures configurations; hooks of those are the candidate's."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_CANDIDATES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TRITON)


@dataclass
class Launches:
    """Counts launches by phase; in `noop` they are not executed.

    Of the candidate's kernels, and of all that the backward launches, it is looked at what they may call and,
    interpreted, whether their programs race and where their results come from."""

    file: str
    own_from: int | None  # the candidate's kernels begin after this line; None: they are all
    flow: Flow | None
    order: str | int | None = None
    phase: str = "forward"
    hanging: Hanging | None = None  # while the stub runs
    races: dict[str, None] = field(default_factory=dict)  # sentences, as they came
    kernels: dict[str, None] = field(default_factory=dict)
    ordered: dict[str, None] = field(default_factory=dict)  # names of kernels with atomics that order
    own: dict[str, None] = field(default_factory=dict)  # names of the candidate's kernels that ran
    counts: dict[str, int] = field(
        default_factory=lambda: {"forward": 0, "backward": 0, "again": 0, "noop": 0}
    )

    def __call__(self, launch: Launch) -> Any:
        self.counts[self.phase] += 1
        if self.hanging is not None:
            self.hanging.launched(launch)
        if self.phase == "noop":
            return None
        if self.phase == "forward" and (self.own_from is None or not self.is_own(launch.fn)):
            return self._of_the_users(launch)
        if self.is_own(launch.fn):
            self.own[launch.name] = None
        self.kernels |= dict.fromkeys(vocabulary.problems(launch.kernel, launch.args, self.is_own))
        ordering = vocabulary.ordering(launch.kernel, launch.args)
        if ordering:
            self.ordered[launch.name] = None
        with accesses.judged(self.order, ordering) as judged:
            result = launch.run()
        where = f"{launch.name} (line {launch.fn.__code__.co_firstlineno})"
        self.races |= dict.fromkeys(f"{where}: {text}" for text in judged.found)
        if self.flow is not None:
            given = accesses.tensors_in(launch.args.values())
            self.flow.launched(given, None if judged.blind else judged.read, judged.wrote)
        return result

    def _of_the_users(self, launch: Launch) -> Any:
        """A launch that nobody judges. Where it may make a gradient it is seen what it wrote."""
        if self.flow is None or not self.flow.scales:
            return launch.run()
        with accesses.judged(None, vocabulary.ordering(launch.kernel, launch.args)) as judged:
            result = launch.run()
        given = accesses.tensors_in(launch.args.values())
        self.flow.forward(given, None if judged.blind else judged.wrote)
        return result

    def is_own(self, fn: Any) -> bool:
        code = fn.__code__
        return code.co_filename == self.file and code.co_firstlineno > (self.own_from or 0)


class Watch:
    """Copies of tensors by name, to tell later which were modified, byte for byte, and which lie in another
    way or want a gradient now and did not."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lying: dict[str, tuple[torch.Tensor, tuple[Any, ...]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._seen[name] = (tensor.detach(), tensor.detach().clone())
        self._lying[name] = (tensor, _lies(tensor))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, (tensor, _) in self._seen.items()]

    def from_here(self, modified: list[str]) -> Watch:
        """The same tensors, watched as they are now. A copy is made anew of those that were `modified`; the
        others' still holds."""
        later = Watch()
        later._seen, later._lying = dict(self._seen), dict(self._lying)
        for name in modified:
            later.add(name, self._lying[name][0])
        return later

    def modified(self) -> list[str]:
        moved = {name for name, (tensor, lay) in self._lying.items() if _lies(tensor) != lay}
        return [name for name, (now, old) in self._seen.items() if name in moved or not same_bytes(now, old)]


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bit patterns: NaN equals the same NaN."""
    a, b = (tensors.raw_bytes(t) for t in (a, b))
    return torch.equal(a, b)
