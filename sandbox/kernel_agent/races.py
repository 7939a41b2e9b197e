"""Races between the programs of one interpreted launch: who met whom in memory with no atomic between them.

The interpreter runs programs one after another, so whatever they do to each other comes out the same each
time; on a GPU it does not. `Races` is told of every access and remembers, for each element that the launch
writes to, who stored, updated and read it last. It finds

  - two programs that store different bytes to one element (the same bytes are no race: whoever comes last);
  - a program that reads what another one stores or updates, before or after it;
  - a plain store or load beside another program's atomic.

Atomics whose results a kernel uses put programs in order, as a lock or a counter of arrivals does: what a
program did before an atomic on an address comes before what another does after a later one on it. Whether
it waited for the right value is not looked at.

Time is counted in *epochs*: one begins with each program, and after each atomic that orders. A load costs a
list entry until something is stored in the same storage; most storages are only read or only written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .rows import Unlike

_PAGE = np.uint64(20)  # bits of an address below the number of its page, where storages are not known
_MOST_PENDING = 1 << 21  # lanes of loads of one storage that wait for a store
_SYNCHRONISING = 64  # an atomic on more addresses than these is work, not a lock

Program = tuple[int, int, int]
Epochs = int | np.ndarray  # of one program, or for each address that of its program
Name = Callable[[int], tuple[str, int]]  # of an address: the argument, and the number of the element in it


class _Shadow:
    """One storage: for each `1 << shift` bytes the epochs of the last plain store, atomic and load, and of
    the last atomic and load by another program than the last one's. 0: never."""

    def __init__(self, base: int, size: int, unit: int) -> None:
        self.base = np.uint64(base)
        self.shift = unit.bit_length() - 1
        self.stored, self.updated, self.updated_before, self.read, self.read_before = (
            np.zeros(-(-size // unit), dtype=np.int32) for _ in range(5)
        )

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Indices of the elements at `addresses`, in order: several each where an access was to a part."""
        if size < 1 << self.shift:
            self._refine(size)
        at = ((addresses - self.base) >> np.uint64(self.shift)).view(np.int64)
        parts = size >> self.shift
        return at if parts == 1 else (at[:, None] + np.arange(parts)).reshape(-1)

    def _refine(self, unit: int) -> None:
        times = (1 << self.shift) // unit
        self.shift = unit.bit_length() - 1
        self.stored, self.updated, self.updated_before, self.read, self.read_before = (
            np.repeat(epochs, times)
            for epochs in (self.stored, self.updated, self.updated_before, self.read, self.read_before)
        )

    def mark(self, kind: str, places: np.ndarray, epoch: Epochs, first: int) -> None:
        """An access at `epoch` by the program whose first epoch is `first`; or by several programs, each with
        one epoch, which rise."""
        if kind == "store":
            self.stored[places] = epoch
            return
        last, before = (
            (self.read, self.read_before) if kind == "load" else (self.updated, self.updated_before)
        )
        if isinstance(epoch, np.ndarray):
            _mark_many(last, before, places, np.repeat(epoch, len(places) // len(epoch)))
            return
        earlier = last[places]
        if earlier.any():
            foreign = (earlier > 0) & ((earlier < first) | (earlier > epoch))
            before[places[foreign]] = earlier[foreign]
        last[places] = epoch


def _mark_many(last: np.ndarray, before: np.ndarray, places: np.ndarray, epochs: np.ndarray) -> None:
    order = np.argsort(places, kind="stable")
    places, epochs = places[order], epochs[order]
    ends = np.flatnonzero(np.append(places[1:] != places[:-1], True))
    groups = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=-1))
    at, newest = places[ends], epochs[ends]
    others = epochs != newest[groups]
    found = np.zeros(len(ends), np.int32)
    np.maximum.at(found, groups[others], epochs[others])
    earlier = last[at]
    found = np.where(found > 0, found, np.where(earlier != newest, earlier, 0))
    before[at] = np.where(found > 0, found, before[at])
    last[at] = newest


class Races:
    """One launch. `regions` are its storages as rows of (first byte, end), sorted, or None where they are not
    known; `ordering`: the kernel uses results of atomics. What was found is in `found`, a sentence for each
    argument and way of meeting."""

    def __init__(self, regions: np.ndarray | None, ordering: bool, name: Name) -> None:
        self.regions, self.ordering, self.name = regions, ordering, name
        self.found: dict[tuple[str, str], str] = {}
        self._shadows: dict[int, _Shadow] = {}
        self._pending: dict[int, list[tuple[np.ndarray, int, Epochs, int]]] = {}
        self._waiting: dict[int, int] = {}
        self._programs: list[Program] = [(-1, -1, -1)]
        self._owners = [0]  # epoch -> number of its program
        self._epoch = self._first = 0  # now; when the running program began
        self._known: dict[int, int] = {}  # program -> its last epoch that comes before what runs now
        self._released: dict[int, dict[int, int]] = {}  # address -> the same for who has an atomic there

    def begin(self, program: Program) -> None:
        self._programs.append(program)
        self._known = {}
        self._next()
        self._first = self._epoch

    def begin_many(self, programs: list[Program]) -> np.ndarray:
        """Programs that run together; none of them orders others. Their epochs."""
        epochs = []
        for program in programs:
            self.begin(program)
            epochs.append(self._epoch)
        return np.array(epochs, np.int32)

    def turn_to(self, epoch: int) -> None:
        """One of those goes on alone."""
        self._epoch = self._first = epoch

    def _next(self) -> None:
        self._owners.append(len(self._programs) - 1)
        self._epoch += 1

    # ---- accesses: addresses of `size` bytes each, in storage `at` (-1: in several, or unknown ones)

    def load(self, addresses: np.ndarray, size: int, at: int) -> None:
        for key, lanes, _ in self._parts(addresses, at):
            shadow = self._shadows.get(key)
            if shadow is None:
                self._pending.setdefault(key, []).append((lanes, size, self._epoch, self._first))
                self._waiting[key] = self._waiting.get(key, 0) + lanes.size
                if self._waiting[key] > _MOST_PENDING:
                    self._shadow(key, size)
                continue
            places = shadow.places(lanes, size)
            for meeting in self._meetings("load", shadow, None):
                self._meet(*meeting[:3], places, lanes)
            shadow.mark("load", places, self._epoch, self._first)

    def store(self, addresses: np.ndarray, size: int, at: int, changes: Callable[[], np.ndarray]) -> None:
        """`changes()`: for each address, whether what is there becomes something else."""
        for key, lanes, chosen in self._parts(addresses, at):
            shadow = self._shadow(key, size)
            places = shadow.places(lanes, size)

            def here(chosen: np.ndarray | slice = chosen) -> np.ndarray:
                return changes()[chosen]

            for did, does, there, counts in self._meetings("store", shadow, here):
                self._meet(did, does, there, places, lanes, counts)
            shadow.mark("store", places, self._epoch, self._first)

    def atomic(self, addresses: np.ndarray, size: int, at: int) -> None:
        for key, lanes, _ in self._parts(addresses, at):
            shadow = self._shadow(key, size)
            places = shadow.places(lanes, size)
            for did, does, there, _ in self._meetings("atomic", shadow, None):
                self._meet(did, does, there, places, lanes)
            shadow.mark("atomic", places, self._epoch, self._first)
        if self.ordering and addresses.size <= _SYNCHRONISING:
            self._synchronise(addresses)

    def many(
        self,
        kind: str,
        addresses: np.ndarray,
        size: int,
        at: int,
        epochs: np.ndarray,
        changes: Callable[[], np.ndarray] | None,
    ) -> None:
        """An access of programs that run together, all to storage `at`: to each address by the program of the
        epoch beside it. Raises Unlike, before anything was noted, where two of them store to one place."""
        if kind == "load" and at not in self._shadows:
            self._pending.setdefault(at, []).append((addresses, size, epochs, 0))
            self._waiting[at] = self._waiting.get(at, 0) + addresses.size
            if self._waiting[at] > _MOST_PENDING:
                self._shadow(at, size)
            return
        shadow = self._shadow(at, size)
        places = shadow.places(addresses, size)
        own = np.repeat(epochs, len(places) // len(addresses))
        if kind == "store" and _meet_each_other(places):
            raise Unlike
        for did, does, there, counts in self._meetings(kind, shadow, changes):
            self._meet(did, does, there, places, addresses, counts, own)
        shadow.mark(kind, places, own, 0)

    @staticmethod
    def _meetings(kind: str, shadow: _Shadow, changes: Any) -> Iterator[tuple[str, str, np.ndarray, Any]]:
        """What an access of a kind may meet: what it does, what others did, their epochs, and what counts."""
        if kind == "load":
            yield "reads", "stores to", shadow.stored, None
            yield "reads", "atomically updates", shadow.updated, None
            yield "reads", "atomically updates", shadow.updated_before, None
        elif kind == "store":
            other = None if changes is None else lambda lanes: changes()[lanes]
            yield "stores to", "stores another value to", shadow.stored, other
            yield "stores to", "reads", shadow.read, other
            yield "stores to", "reads", shadow.read_before, other
            yield "stores to", "atomically updates", shadow.updated, None
            yield "stores to", "atomically updates", shadow.updated_before, None
        else:
            yield "atomically updates", "stores to", shadow.stored, None
            yield "atomically updates", "reads", shadow.read, None
            yield "atomically updates", "reads", shadow.read_before, None

    def _synchronise(self, addresses: np.ndarray) -> None:
        """What others did before their atomics on these addresses is before what comes now; and so on."""
        self._known[self._owners[self._epoch]] = self._epoch
        for address in addresses.tolist():
            released = self._released.setdefault(address, {})
            for program, epoch in released.items():
                self._known[program] = max(epoch, self._known.get(program, 0))
            released.update(self._known)
        self._next()

    # ---- storages

    def _parts(self, addresses: np.ndarray, at: int) -> Iterator[tuple[int, np.ndarray, np.ndarray | slice]]:
        """The storages that are accessed, the addresses in each, and which of all those are."""
        if addresses.size == 0:
            return
        if at >= 0:
            yield at, addresses, slice(None)
            return
        if self.regions is None:
            keys = (addresses >> _PAGE).view(np.int64)
        else:
            keys = np.searchsorted(self.regions[:, 0], addresses, side="right") - 1
        for key in np.unique(keys).tolist():
            chosen = keys == key
            yield key, addresses[chosen], chosen

    def _shadow(self, key: int, size: int) -> _Shadow:
        shadow = self._shadows.get(key)
        if shadow is None:
            waiting = self._pending.pop(key, [])
            unit = min([size, *(size for _, size, _, _ in waiting)])
            if self.regions is None:
                base, end = key << int(_PAGE), (key + 1 << int(_PAGE)) + 8
            else:
                base, end = self.regions[key].tolist()
            shadow = self._shadows[key] = _Shadow(base, end - base, unit)
            for lanes, size, epoch, first in waiting:
                shadow.mark("load", shadow.places(lanes, size), epoch, first)
        return shadow

    # ---- meetings

    def _meet(
        self,
        did: str,
        does: str,
        epochs: np.ndarray,
        places: np.ndarray,
        lanes: np.ndarray,
        counts: Callable[[np.ndarray], np.ndarray] | None = None,
        own: np.ndarray | None = None,
    ) -> None:
        """The running program meets at `places` those of `epochs`. `counts` says of numbers of lanes whether
        it matters. `own`: the epochs of those that run, by place, where they are several."""
        then = epochs[places]
        if not then.any():
            return
        foreign = (then > 0) & ((then < self._first) | (then > self._epoch) if own is None else then != own)
        if self.ordering and self._known and foreign.any():
            foreign &= ~np.isin(then, [e for e in np.unique(then[foreign]).tolist() if self._after(e)])
        at = np.flatnonzero(foreign)
        if at.size and counts is not None:
            at = at[counts(at // (len(places) // len(lanes)))]
        if at.size:
            address = int(lanes[at[0] // (len(places) // len(lanes))])
            now = self._epoch if own is None else int(own[at[0]])
            self._tell(did, does, address, now, int(then[at[0]]))

    def _after(self, epoch: int) -> bool:
        return self._known.get(self._owners[epoch], 0) >= epoch

    def _tell(self, did: str, does: str, address: int, own: int, epoch: int) -> None:
        argument, element = self.name(address)
        now, other = self._programs[self._owners[own]], self._programs[self._owners[epoch]]
        self.found.setdefault(
            (argument, did + does),
            f"program {now} {did} {argument}[{element}], which program {other} {does}: "
            "on a GPU nobody knows in which order",
        )


def _meet_each_other(places: np.ndarray) -> bool:
    ordered = np.sort(places)
    return bool((ordered[1:] == ordered[:-1]).any())
