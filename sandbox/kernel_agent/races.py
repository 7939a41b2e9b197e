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

import numpy as np

_PAGE = np.uint64(20)  # bits of an address below the number of its page, where storages are not known
_MOST_PENDING = 1 << 21  # lanes of loads of one storage that wait for a store
_SYNCHRONISING = 64  # an atomic on more addresses than these is work, not a lock

Program = tuple[int, int, int]
Name = Callable[[int], tuple[str, int]]  # of an address: the argument, and the number of the element in it


class _Shadow:
    """One storage: for each `1 << shift` bytes the epochs of the last plain store, atomic and load, and of
    the last load by another program than that one's. 0: never."""

    def __init__(self, base: int, size: int, unit: int) -> None:
        self.base = np.uint64(base)
        self.shift = unit.bit_length() - 1
        self.stored, self.updated, self.read, self.read_before = (
            np.zeros(-(-size // unit), dtype=np.int32) for _ in range(4)
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
        self.stored, self.updated, self.read, self.read_before = (
            np.repeat(epochs, times) for epochs in (self.stored, self.updated, self.read, self.read_before)
        )

    def mark_read(self, places: np.ndarray, epoch: int, first: int) -> None:
        """A load at `epoch` by the program whose first epoch is `first`."""
        last = self.read[places]
        if last.any():
            foreign = last < first
            self.read_before[places[foreign]] = last[foreign]
        self.read[places] = epoch


class Races:
    """One launch. `regions` are its storages as rows of (first byte, end), sorted, or None where they are not
    known; `ordering`: the kernel uses results of atomics. What was found is in `found`, a sentence for each
    argument and way of meeting."""

    def __init__(self, regions: np.ndarray | None, ordering: bool, name: Name) -> None:
        self.regions, self.ordering, self.name = regions, ordering, name
        self.found: dict[tuple[str, str], str] = {}
        self._shadows: dict[int, _Shadow] = {}
        self._pending: dict[int, list[tuple[np.ndarray, int, int, int]]] = {}
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
            self._meet("reads", "stores to", shadow.stored, places, lanes)
            self._meet("reads", "atomically updates", shadow.updated, places, lanes)
            shadow.mark_read(places, self._epoch, self._first)

    def store(self, addresses: np.ndarray, size: int, at: int, changes: Callable[[], np.ndarray]) -> None:
        """`changes()`: for each address, whether what is there becomes something else."""
        for key, lanes, chosen in self._parts(addresses, at):
            shadow = self._shadow(key, size)
            places = shadow.places(lanes, size)

            def other(lanes: np.ndarray, chosen: np.ndarray | slice = chosen) -> np.ndarray:
                return changes()[chosen][lanes]

            self._meet("stores to", "stores another value to", shadow.stored, places, lanes, other)
            self._meet("stores to", "reads", shadow.read, places, lanes, other)
            self._meet("stores to", "reads", shadow.read_before, places, lanes, other)
            self._meet("stores to", "atomically updates", shadow.updated, places, lanes)
            shadow.stored[places] = self._epoch

    def atomic(self, addresses: np.ndarray, size: int, at: int) -> None:
        for key, lanes, _ in self._parts(addresses, at):
            shadow = self._shadow(key, size)
            places = shadow.places(lanes, size)
            for does, epochs in (
                ("stores to", shadow.stored),
                ("reads", shadow.read),
                ("reads", shadow.read_before),
            ):
                self._meet("atomically updates", does, epochs, places, lanes)
            shadow.updated[places] = self._epoch
        if self.ordering and addresses.size <= _SYNCHRONISING:
            self._synchronise(addresses)

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
                shadow.mark_read(shadow.places(lanes, size), epoch, first)
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
    ) -> None:
        """The running program meets at `places` those of `epochs`. `counts` says of numbers of lanes whether
        it matters."""
        then = epochs[places]
        if not then.any():
            return
        foreign = (then > 0) & (then < self._first)
        if self.ordering and self._known and foreign.any():
            foreign &= ~np.isin(then, [e for e in np.unique(then[foreign]).tolist() if self._after(e)])
        at = np.flatnonzero(foreign)
        if at.size and counts is not None:
            at = at[counts(at // (len(places) // len(lanes)))]
        if at.size:
            address = int(lanes[at[0] // (len(places) // len(lanes))])
            self._tell(did, does, address, int(then[at[0]]))

    def _after(self, epoch: int) -> bool:
        return self._known.get(self._owners[epoch], 0) >= epoch

    def _tell(self, did: str, does: str, address: int, epoch: int) -> None:
        argument, element = self.name(address)
        now, other = self._programs[-1], self._programs[self._owners[epoch]]
        self.found.setdefault(
            (argument, did + does),
            f"program {now} {did} {argument}[{element}], which program {other} {does}: "
            "on a GPU nobody knows in which order",
        )
