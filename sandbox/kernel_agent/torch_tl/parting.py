"""Programs of a group that part for a while, and meet again.

A loop of which programs take different numbers of turns, or a branch of which they take different sides, is
evaluated by those that agree, one set of them after another; behind it all go on together. Rewritten code
(instrument.py) says when: at the start of a body it calls `narrow` where `cut` is set, behind the statement
`meet` where `parted`. Both get the function's variables and return those that have other values then. A
program that leaves a loop keeps what its variables held. One that a variable was never assigned in has none
of it afterwards, and then nobody has: it is None.

Where variables cannot be divided or put together (an object of a kind that is not known, other types on two
sides), Diverged is raised, and the programs are evaluated apart from the start of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from kernel_agent.torch_tl.builder import OldValues
from kernel_agent.torch_tl.handles import BlockPointer, Constant, Diverged, Handle, Pointer
from kernel_agent.torch_tl.memory import Memory

Variables = dict[str, Any]


class Unknown(Exception):
    """A value that cannot be divided among programs."""


@dataclass(frozen=True)
class Names:
    """Variables, to a statement. `read`: what its body needs or changes; `changed`: what it assigns to and is
    read later; `kept`: what is read later and it does not assign to; `dead`: what it assigns to and nobody
    reads later."""

    read: tuple[str, ...]
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    dead: tuple[str, ...]


def some(names: Iterable[str], variables: Variables) -> Variables:
    return {name: variables[name] for name in names if name in variables}


class Apart:
    """One execution of a statement, by the programs that are in memory now."""

    def __init__(self, memory: Memory, names: Names) -> None:
        self.memory = memory
        self.names = names
        self.programs = memory.programs
        self.at = torch.arange(self.programs.numel())  # which of them go on, on the CPU
        self.cut: torch.Tensor | None = None  # of those, which do from here
        self.aside: list[tuple[torch.Tensor, Variables]] = []
        self.before: Variables | None = None  # what was kept or, of a branch, is needed on both sides

    @property
    def parted(self) -> bool:
        return bool(self.aside)

    def narrow(self, variables: Variables) -> Variables:
        """Those of `cut` go on, with these variables; the others are through."""
        assert self.cut is not None
        going, self.cut = self.cut, None
        if self.before is None:
            self.before = some(self.names.kept, variables)
        held = self._picked(some(self.names.changed, variables), ~going)
        self.aside.append((self.at[~going], held))
        return self._go_on(going, variables)

    def _go_on(self, which: torch.Tensor, variables: Variables) -> Variables:
        read = self._picked(some(self.names.read, variables), which)
        self.at = self.at[which]
        self.memory.programs = self.programs[self.at.to(self.programs.device)]
        return read

    def _picked(self, variables: Variables, which: torch.Tensor) -> Variables:
        count, index = which.numel(), which.nonzero().reshape(-1).to(self.programs.device)
        try:
            return {name: picked(value, index, count) for name, value in variables.items()}
        except Unknown:
            raise Diverged(which) from None

    def meet(self, variables: Variables) -> Variables:
        """All programs that came to the statement go on together, with these variables."""
        parts = [*self.aside, (self.at, some(self.names.changed, variables))]
        self.memory.programs = self.programs
        counts = [at.numel() for at, _ in parts]
        order = torch.cat([at for at, _ in parts]).argsort().to(self.programs.device)
        made = some(self.names.kept, self.before or {}) | dict.fromkeys(self.names.dead)
        for name in self.names.changed:
            found = [held.get(name) for _, held in parts]
            missing = any(value is None for value in found)
            try:
                made[name] = None if missing else together(found, counts, order)
            except Unknown:
                raise Diverged(self._parts_of(parts)) from None
        return made

    def _parts_of(self, parts: Sequence[tuple[torch.Tensor, Variables]]) -> torch.Tensor:
        keys = torch.zeros(self.programs.numel(), dtype=torch.int64)
        for number, (at, _) in enumerate(parts):
            keys[at] = number
        return keys


class Rounds(Apart):
    """A `while` loop."""

    def goes(self, decided: bool | torch.Tensor) -> bool:
        if isinstance(decided, bool):
            return decided
        self.cut = decided
        return True


class Sides(Apart):
    """An `if` statement: yields True and then False, or only one of them."""

    def __init__(self, memory: Memory, names: Names, decided: bool | torch.Tensor) -> None:
        super().__init__(memory, names)
        self.decided = decided

    def __iter__(self) -> Iterator[bool]:
        if isinstance(self.decided, bool):
            yield self.decided
            return
        for side in (True, False):
            self.cut = self.decided if side else ~self.decided
            yield side

    def narrow(self, variables: Variables) -> Variables:
        """From the second side on `variables` are of the first."""
        assert self.cut is not None
        side, self.cut = self.cut, None
        if self.before is None:
            self.before = some((*self.names.read, *self.names.kept), variables)
        else:
            self.aside.append((self.at, some(self.names.changed, variables)))
            self.memory.programs, self.at = self.programs, torch.arange(self.programs.numel())
        # What the first side has assigned, and nobody before, is not the second one's.
        unset = {name: None for name in self.names.changed if name not in self.before}
        return unset | self._go_on(side, self.before)


class Turns(Apart):
    """A `for` loop over anything."""

    def __init__(self, memory: Memory, names: Names, values: Iterable[Any]) -> None:
        super().__init__(memory, names)
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self.values, Ragged):
            yield from self.values
            return
        counts = self.values.counts(self.programs.numel())
        leaving = set(counts.tolist())
        for turn in range(int(counts.max())):
            if turn in leaving:
                self.cut = counts[self.at] > turn
            at = self.at if self.cut is None else self.at[self.cut]
            yield self.values.value(turn, at)


@dataclass(frozen=True)
class Ragged:
    """A range of which start or stop differ among programs: a number, or int64 on the CPU, one a program.
    `scalar` makes a loop's variable of either."""

    start: int | torch.Tensor
    stop: int | torch.Tensor
    step: int
    scalar: Callable[[int | torch.Tensor], tl.tensor]

    def counts(self, programs: int) -> torch.Tensor:
        """Turns by program."""
        way = torch.as_tensor(self.stop) - torch.as_tensor(self.start)
        turns = -torch.div(-way, self.step, rounding_mode="floor")
        return turns.clamp(min=0).expand(programs)

    def keys(self, programs: int) -> torch.Tensor:
        """A number for each program, the same for those that have the same range."""
        bounds = [torch.as_tensor(side).expand(programs) for side in (self.start, self.stop)]
        return torch.unique(torch.stack(bounds), dim=1, return_inverse=True)[1]

    def value(self, turn: int, at: torch.Tensor) -> tl.tensor:
        """The loop's variable at its n-th turn, for the programs `at` of those that came to the loop."""
        start = self.start if isinstance(self.start, int) else self.start[at]
        return self.scalar(start + turn * self.step)


# ---- values


def picked(value: Any, index: torch.Tensor, count: int) -> Any:
    """Of a variable of `count` programs what those of `index` have."""
    if isinstance(value, tl.tensor):
        handle = _handle_picked(value.handle, index, count)
        return value if handle is value.handle else tl.tensor(handle, value.type)
    if isinstance(value, (tuple, list, tl.tuple)):
        items = [picked(item, index, count) for item in value]
        same = all(one is other for one, other in zip(items, value, strict=True))
        return value if same else _like(value, items)
    if isinstance(value, tl.core.tensor_descriptor_base):
        if _handle_picked(value.handle, index, count) != value.handle:
            raise Unknown
        return value
    return _plain(value)


def _handle_picked(handle: Any, index: torch.Tensor, count: int) -> Any:
    if isinstance(handle, OldValues):
        return OldValues(lambda: _data_picked(handle.data, index, count))
    if isinstance(handle, BlockPointer):
        lists = [[_handle_picked(one, index, count) for one in several] for several in _parts(handle)]
        return _block_pointer(handle, lists)
    if not isinstance(handle, Handle):
        return handle
    data = _data_picked(handle.data, index, count)
    return handle if data is handle.data else handle.like(data)


def _data_picked(data: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return data.index_select(0, index) if data.shape[0] == count > 1 else data


def together(values: list[Any], counts: list[int], order: torch.Tensor) -> Any:
    """One variable of what parts of the programs have in theirs. `order` puts them into their places."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, tl.tensor):
        if not all(isinstance(value, tl.tensor) and value.type == first.type for value in values):
            raise Unknown
        return tl.tensor(_handles_together([value.handle for value in values], counts, order), first.type)
    if isinstance(first, (tuple, list, tl.tuple)):
        if not all(type(value) is type(first) and len(value) == len(first) for value in values):
            raise Unknown
        columns = zip(*(list(value) for value in values), strict=True)
        return _like(first, [together(list(column), counts, order) for column in columns])
    if not all(type(_plain(value)) is type(first) and value == first for value in values):
        raise Unknown
    return first


def _handles_together(handles: list[Any], counts: list[int], order: torch.Tensor) -> Any:
    first = handles[0]
    if all(handle is first for handle in handles):
        return first
    if any(isinstance(handle, OldValues) for handle in handles):
        return OldValues(lambda: _data_together([handle.data for handle in handles], counts, order))
    if isinstance(first, BlockPointer):
        columns = [zip(*several, strict=True) for several in zip(*map(_parts, handles), strict=True)]
        lists = [[_handles_together(list(one), counts, order) for one in column] for column in columns]
        return _block_pointer(first, lists)
    if _same_constant(handles):
        return first
    data = _data_together([handle.data for handle in handles], counts, order)
    if not isinstance(first, Pointer):
        return Handle(data)
    cell = first.cell if all(handle.cell is first.cell for handle in handles) else None
    name = first.name if all(handle.name == first.name for handle in handles) else None
    return Pointer(data, first.element, cell, name, any(handle.detached for handle in handles))


def _same_constant(handles: list[Handle]) -> bool:
    first = handles[0]
    return isinstance(first, Constant) and all(
        isinstance(handle, Constant)
        and handle.data.shape == first.data.shape
        and handle.data.shape[0] == 1
        and handle.value == first.value
        for handle in handles
    )


def _data_together(data: list[torch.Tensor], counts: list[int], order: torch.Tensor) -> torch.Tensor:
    if len({(part.dtype, part.shape[1:]) for part in data}) > 1:
        raise Unknown
    if any(part.shape[0] not in (1, count) for part, count in zip(data, counts, strict=True)):
        raise Unknown
    whole = [part.expand(count, *part.shape[1:]) for part, count in zip(data, counts, strict=True)]
    return torch.cat(whole).index_select(0, order)


def _parts(pointer: BlockPointer) -> list[list[Handle]]:
    return [[pointer.base], pointer.shape, pointer.strides, pointer.offsets]


def _block_pointer(like: BlockPointer, lists: list[list[Any]]) -> BlockPointer:
    base, shape, strides, offsets = lists
    return replace(like, base=base[0], shape=shape, strides=strides, offsets=offsets)


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tl.tuple):
        return tl.tuple(items)
    return type(value)(*items) if hasattr(type(value), "_fields") else type(value)(items)


def _plain(value: Any) -> Any:
    """A value that is the same for all programs."""
    if isinstance(value, tl.core.base_value) and not isinstance(value, tl.constexpr):
        raise Unknown
    return value
