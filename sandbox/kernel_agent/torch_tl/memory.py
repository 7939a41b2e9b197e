"""Storages as flat differentiable tensors, and the map of who read and wrote what.

A `Cell` stands for one storage. `Memory` performs a group's loads and stores on cells: a load is a gather, a
store replaces `cell.flat` by a tensor with the new values scattered in, so autograd sees every version. For
each launch it keeps, per address, the lowest and highest program that read it, stored to it and atomically
updated it. Those maps find races, and tell when evaluating programs together would differ from running them
in order (`NeedsOrder`). Out-of-bounds accesses raise KernelError naming the argument and the index.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import triton.language as tl

from kernel_agent.torch_tl.handles import (
    EXACT,
    FLOAT_DTYPES,
    INT_DTYPES,
    Diverged,
    KernelError,
    NeedsOrder,
    Pointer,
    lane_view,
)
from kernel_agent.torch_tl.kinks import Kinks
from kernel_agent.torch_tl.maxima import Maxima

NOBODY_LOW = 2**31 - 1
NOBODY_HIGH = -1
SIGNED_BITS = {getattr(torch, f"uint{bits}"): getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}


@dataclass(eq=False)
class Cell:
    """One storage: `flat` has its elements in the evaluation's precision, `dtype` and `base` are the real."""

    flat: torch.Tensor
    dtype: torch.dtype
    base: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def holds(self, element: tl.dtype) -> bool:
        """Whether a pointer to `element` reads the storage's elements as what they are."""
        if self.dtype.is_floating_point:
            return FLOAT_DTYPES.get(element.name) == self.dtype
        return element.is_int() and max(8, element.primitive_bitwidth) == 8 * self.itemsize


def cell_values(real: torch.Tensor, precision: str) -> torch.Tensor:
    """The elements of a real flat tensor as a cell keeps them: a copy, floats widened, integers signed."""
    if real.dtype.is_floating_point:
        wide = real.dtype == torch.float64 or precision == EXACT
        return real.to(torch.float64 if wide else torch.float32, copy=True)
    return real.view(SIGNED_BITS.get(real.dtype, real.dtype)).clone()


@dataclass
class Span:
    """Per address, the lowest and highest program that did something to it."""

    low: torch.Tensor
    high: torch.Tensor

    @staticmethod
    def empty(numel: int, device: torch.device) -> Span:
        low = torch.full((numel,), NOBODY_LOW, dtype=torch.int32, device=device)
        return Span(low, torch.full_like(low, NOBODY_HIGH))

    def clone(self) -> Span:
        return Span(self.low.clone(), self.high.clone())

    def add(self, index: torch.Tensor, program: torch.Tensor) -> None:
        self.low.scatter_reduce_(0, index, program, "amin")
        self.high.scatter_reduce_(0, index, program, "amax")

    def others(self, index: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        """Where a program other than `program` is in the span."""
        low, high = self.low[index], self.high[index]
        return (high != NOBODY_HIGH) & ((low != program) | (high != program))


@dataclass
class Track:
    """Who touched a cell in this launch. Made at its first write; reads before that wait in Memory.reads."""

    read: Span
    stored: Span
    updated: Span
    reads_seen: int = 0

    def clone(self) -> Track:
        return Track(self.read.clone(), self.stored.clone(), self.updated.clone(), self.reads_seen)


@dataclass
class Read:
    cell: Cell
    index: torch.Tensor
    mask: torch.Tensor | None
    programs: torch.Tensor


@dataclass
class Counts:
    """What the launches moved. `races` has one sentence per distinct race, `undefined` one per masked load
    whose masked lanes have no `other`: they are 0 here and in the interpreter, and anything when compiled."""

    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0
    races: list[str] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)

    def copy(self) -> Counts:
        return replace(self, races=list(self.races), undefined=list(self.undefined))


class Memory:
    """Cells of one evaluation. `where()` names the place being evaluated, for races and errors.

    `checked` False is for an evaluation whose addresses an earlier one has gone through: nothing is counted,
    no bound and no conflict is looked for, which on a GPU saves a wait for the device at each access. An
    address that lies outside all the same (it may depend on data that was moved by rounding) is brought back
    inside.

    `compiled`: what is evaluated ran on a GPU, wherever this memory is.

    `copies`: so many evaluations of the same calls at once, not `checked`. A cell has the elements of each
    behind those of the one before, a launch the programs of each; no access leaves its own.
    """

    def __init__(
        self,
        precision: str,
        device: torch.device | str = "cpu",
        checked: bool = True,
        met: list[bool] | None = None,
        compiled: bool = False,
        copies: int = 1,
    ) -> None:
        self.copies = copies
        self.precision = precision
        self.checked = checked
        self.met = met if met is not None else []  # of each store in turn: do lanes meet at one address?
        self.stores = 0
        self.until: float | None = None  # by time.thread_time(): an evaluation that takes more is given up
        self.watch: Callable[[], None] | None = None  # called before each operation; may raise
        self.device = torch.device(device)
        self.compiled = compiled
        self.cells: list[Cell] = []
        self.counts = Counts()
        self.kinks: Kinks | None = None
        self.maxima: Maxima | None = None
        self.where: Callable[[], str] = lambda: "kernel"
        self.ordered = False
        self.in_tf32 = False  # a product cut its operands off
        self.launch_programs = 1  # of all copies
        self.synchronised = False
        self.programs = torch.zeros(1, dtype=torch.int32, device=self.device)  # that are evaluated now,
        self.group = self.programs  # of these, in ascending order
        self.tracks: dict[int, Track] = {}
        self.reads: list[Read] = []
        self._launch_start: dict[Cell, torch.Tensor] = {}
        self._launch_counts = self.counts
        self._launch_stores = 0
        self._group_start: dict[Cell, tuple[torch.Tensor, Track | None]] = {}
        self._group_counts = self.counts
        self._group_reads = 0

    def add(self, cell: Cell) -> Cell:
        self.cells.append(cell)
        return cell

    # ---- launches and groups

    def begin_launch(self, programs: int, ordered: bool) -> None:
        """`ordered`: programs come one at a time, in order: dependencies between them are races to report."""
        if self.kinks:
            self.kinks.begin_launch()
        self.ordered = ordered
        self.launch_programs = programs
        self.synchronised = False
        self._forget_accesses()
        self._launch_start = {}
        self._launch_counts = self.counts.copy()
        self._launch_stores = self.stores

    def undo_launch(self) -> None:
        if self.kinks:
            self.kinks.undo_launch()
        for cell, flat in self._launch_start.items():
            cell.flat = flat
        self.counts = self._launch_counts
        self.stores = self._launch_stores
        if self.checked:
            del self.met[self.stores :]
        self._forget_accesses()

    def end_launch(self) -> None:
        self._forget_accesses()
        self._launch_start = {}
        self._group_start = {}

    def _forget_accesses(self) -> None:
        self.tracks = {}
        self.reads = []

    def begin_group(self, programs: torch.Tensor) -> None:
        self.group = self.programs = programs.to(torch.int32)
        self._group_start = {}
        self._group_counts = self.counts.copy()
        self._group_reads = len(self.reads)

    def undo_group(self) -> None:
        for cell, (flat, track) in self._group_start.items():
            cell.flat = flat
            if track is None:
                self.tracks.pop(id(cell), None)
            else:
                self.tracks[id(cell)] = track
        del self.reads[self._group_reads :]
        self.counts = self._group_counts

    def keys_of_group(self, keys: torch.Tensor) -> torch.Tensor:
        """A key for each program of the group, of those that are evaluated now: all others have one."""
        _, number = keys.to(self.device).unique(return_inverse=True)
        made = torch.full_like(self.group, -1)
        made[torch.searchsorted(self.group, self.programs)] = number.to(made.dtype)
        return made

    # ---- accesses

    def load(self, ptr: Pointer, mask: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
        """Gather (programs or 1, *shape); masked lanes give `other`, or 0."""
        if self.until is not None and time.thread_time() > self.until:
            raise KernelError(
                "the evaluation in float64 takes too long at this shape",
                kind="too_large",
                remedy="make the shape smaller, or mark it required: False",
            )
        cell = self._cell_of(ptr, mask)
        index, active = self._index(cell, ptr, mask, "reads")
        if self.checked:
            self._note_read(cell, index, mask, ptr, active)
        flat = cell.flat.detach() if ptr.detached else cell.flat
        value = self._gathered(flat, index) if cell.numel else flat.new_zeros(index.shape)
        value = value.to(self.value_dtype(ptr.element))
        if mask is not None:
            if self.checked and other is None and active < index.numel():
                self._note(self.counts.undefined, f"masked lanes of {ptr.name or 'a load'} have no other")
            value = torch.where(mask, value, value.new_zeros(()) if other is None else other.to(value.dtype))
        return value

    def store(self, ptr: Pointer, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Scatter; where lanes collide the last program's last lane wins."""
        cell = self._cell_of(ptr, mask)
        index, _ = self._index(cell, ptr, mask, "writes")
        self.stores += 1
        if not self.checked and self.met[self.stores - 1 : self.stores] == [False]:
            self._store_apart(cell, index, value, mask)
            return
        lanes, values, program = self._active(index, mask, value, cell)
        self.counts.bytes_written += lanes.numel() * cell.itemsize
        if self.checked:
            self.met.append(False)
        if not lanes.numel():
            return
        self._save(cell)
        watched = self.checked and self.launch_programs > 1
        if watched:
            track = self._track(cell)
            self._conflict(track.read.others(lanes, program), "writes what another program reads", ptr)
            before = cell.flat.detach()[lanes]
            changed = differs(before, values.detach())
            stored = track.stored.others(lanes, program) | track.updated.others(lanes, program)
            self._conflict(stored & changed, "writes another value where another program wrote", ptr)
        count = lanes.numel()
        lanes, values, program = self._last_writers(lanes, values, program, ptr)
        cell.flat = cell.flat.index_put((lanes,), values)
        if self.checked:
            self.met[-1] = lanes.numel() < count
        if watched:
            track.stored.add(lanes, program)

    def _store_apart(
        self, cell: Cell, index: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """A store whose lanes do not meet, without a look at them: masked ones go behind the cell."""
        lanes = self._spread(index, index)
        values = self._spread(value, index).to(cell.flat.dtype)
        self._save(cell)
        if mask is None:
            cell.flat = cell.flat.index_put((lanes,), values)
            return
        lanes = torch.where(self._spread(mask, index), lanes, cell.numel)
        longer = torch.cat([cell.flat, cell.flat.new_zeros(1)])
        cell.flat = longer.index_put((lanes,), values)[:-1]

    def atomic(
        self, update: str, ptr: Pointer, value: torch.Tensor, mask: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        """Perform add, max, min, and, or, xor or xchg on every active lane. The result gives the old values
        when called: only then does order matter."""
        cell = self._cell_of(ptr, mask)
        index, _ = self._index(cell, ptr, mask, "atomically updates")
        lanes, values, program = self._active(index, mask, value, cell)
        self.counts.atomics += lanes.numel()
        self.counts.bytes_written += lanes.numel() * cell.itemsize
        self._save(cell)
        watched = self.checked and self.launch_programs > 1 and lanes.numel() > 0
        if watched:
            track, what = self._track(cell), "atomically updates what another program"
            self._conflict(track.stored.others(lanes, program), f"{what} stores", ptr)
            self._conflict(track.read.others(lanes, program), f"{what} reads", ptr)
        old = cell.flat
        shape = (self.programs.numel(), *index.shape[1:])
        cell.flat = self._combine(update, old, lanes, values)
        if watched:
            track.updated.add(lanes, program)
        dtype = self.value_dtype(ptr.element)
        return lambda: self._old_values(update, old, lanes, values, mask, shape).to(dtype)

    def value_dtype(self, element: tl.dtype) -> torch.dtype:
        """The torch dtype in which values of a Triton scalar type are computed."""
        if element.is_floating():
            if self.precision == EXACT:
                return torch.float64
            if element.name not in FLOAT_DTYPES:
                raise KernelError(f"{element} has no counterpart in torch", remedy="use another dtype")
            return FLOAT_DTYPES[element.name]
        return INT_DTYPES[element.primitive_bitwidth]

    def require_single(self, what: str) -> None:
        """Raises KernelError where copies are evaluated, for which `what` is not, or not the same."""
        if self.copies > 1:
            raise KernelError(f"{what} is not evaluated in several copies")

    # ---- parts of an access

    def _cell_of(self, ptr: Pointer, mask: torch.Tensor | None) -> Cell:
        cell = ptr.cell or self._locate(ptr, mask)
        if not cell.holds(ptr.element):
            raise KernelError(
                f"a {cell.dtype} tensor is accessed through a pointer to {ptr.element}",
                remedy="bit casts have no gradient: pass a tensor of that dtype",
            )
        return cell

    def _locate(self, ptr: Pointer, mask: torch.Tensor | None) -> Cell:
        """The cell of pointers that were read from memory, or chosen among several tensors."""
        self.require_single("a pointer that is not derived from one argument")
        owner = torch.full_like(ptr.data, -1)
        for number, cell in enumerate(self.cells):
            inside = (ptr.data >= cell.base) & (ptr.data < cell.base + max(1, cell.numel) * cell.itemsize)
            owner = torch.where(inside, number, owner)
        if mask is not None:
            owner = torch.where(mask, owner, -1)
        highest = owner.reshape(owner.shape[0], -1).amax(1)
        active = torch.ones_like(owner, dtype=torch.bool) if mask is None else mask.expand(owner.shape)
        if bool((active & (owner < 0)).any()):
            raise KernelError("an address that belongs to no tensor is accessed", kind="stub_raised")
        if bool((active & (owner != lane_view(highest, owner.dim() - 1))).any()):
            raise KernelError(
                "one block of pointers points into several tensors", remedy="load from each tensor separately"
            )
        known = highest[highest >= 0]
        if known.numel() and bool((known != known[0]).any()):
            raise Diverged(highest)
        return self.cells[int(known[0])] if known.numel() else self.cells[0]

    def _index(
        self, cell: Cell, ptr: Pointer, mask: torch.Tensor | None, verb: str
    ) -> tuple[torch.Tensor, int]:
        """Element numbers, of any element on masked lanes; and how many are not masked off, where that is
        counted."""
        offset = ptr.data - cell.base
        index = torch.div(offset, cell.itemsize, rounding_mode="floor") if cell.itemsize > 1 else offset
        if not self.checked:
            return self._inside(cell, index), 0
        if mask is not None:
            index = torch.where(mask, index, 0)
        if not index.numel():
            return index, 0
        told = [*torch.aminmax(index), *([] if mask is None else [mask.sum()])]
        low, high, *unmasked = torch.stack([number.to(torch.int64) for number in told]).tolist()  # one wait
        active = unmasked[0] * (index.numel() // mask.numel()) if mask is not None else index.numel()
        empty = cell.numel == 0 and active > 0
        if low < 0 or high >= max(1, cell.numel) or empty:
            bad = low if low < 0 else high
            lane = (index == bad).nonzero()[0]
            batch = int(lane[0]) if index.shape[0] == self.programs.numel() else 0
            what = f"{self.where()} {verb} {ptr.name or 'a tensor'}[{bad}], which is out of bounds"
            raise KernelError(
                f"{what}: its storage has {cell.numel} elements (program {int(self.programs[batch])})",
                kind="stub_raised",
                remedy="mask the access, or check the strides and sizes passed to the kernel",
            )
        return index, active

    def _gathered(self, flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The elements. What all programs of a launch load from one address is one element here, before it
        is rounded and whatever is computed of it; of copies, one for each program, of whose gradients
        autograd makes sums in another order. In the inputs' own dtypes that is another rounding error, and
        none of an evaluation that is held against a candidate."""
        each = self.launch_programs // self.copies
        if (
            self.copies > 1
            and each > 1
            and flat.requires_grad
            and not (self.ordered or self.precision == EXACT)
        ):
            all_here = self.programs.numel() == self.launch_programs
            apart = index.reshape(-1, each, *index.shape[1:]) if all_here else index
            if not all_here or torch.equal(apart, apart[:, :1].expand_as(apart)):
                self.require_single("a load that programs share")
        return flat.index_select(0, index.reshape(-1)).reshape(index.shape)

    def _inside(self, cell: Cell, index: torch.Tensor) -> torch.Tensor:
        """What lies outside of the cell, or of its own copy's part, is brought back."""
        count = cell.numel // self.copies
        if self.copies == 1:
            return index.clamp(0, max(0, count - 1))
        copy = self.programs.to(torch.int64) // (self.launch_programs // self.copies)
        first = lane_view(copy * count, index.dim() - 1)
        return index.clamp(first, first + max(0, count - 1))

    def _active(
        self, index: torch.Tensor, mask: torch.Tensor | None, value: torch.Tensor, cell: Cell
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat (element, value, program) of the lanes that are not masked off, for every program."""
        lanes = self._spread(index, index)
        values = self._spread(value, index).to(cell.flat.dtype)
        program = self._spread(lane_view(self.programs, index.dim() - 1), index)
        if mask is not None:
            chosen = self._spread(mask, index).nonzero().reshape(-1)
            if chosen.numel() != lanes.numel():
                lanes, values, program = lanes[chosen], values[chosen], program[chosen]
        return lanes, values, program

    def _spread(self, block: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """A block with an element for every program and lane of `index`, flat."""
        return block.expand(self.programs.numel(), *index.shape[1:]).reshape(-1)

    def _last_writers(
        self, lanes: torch.Tensor, values: torch.Tensor, program: torch.Tensor, ptr: Pointer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drop all but the last writer of each address."""
        order, last = last_of_runs(lanes)
        if bool(last.all()):
            return lanes, values, program
        winner = order[last]
        keep = winner.sort().values
        if not self.checked:
            return lanes[keep], values[keep], program[keep]
        run = torch.cumsum(last, 0) - last.to(torch.int64)
        lost = differs(values.detach()[order], values.detach()[winner][run])
        other = program[order] != program[winner][run]
        self._conflict(lost & other, "writes another value where another program writes", ptr)
        if bool((lost & ~other).any()):
            element = f"one element of {ptr.name or 'a tensor'}"
            self._race(f"two lanes of one program write different values to {element}")
        return lanes[keep], values[keep], program[keep]

    def _combine(
        self, update: str, flat: torch.Tensor, lanes: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if not lanes.numel():
            return flat
        if update == "add":
            return flat.index_put((lanes,), values, accumulate=True)
        if update in ("max", "min"):
            return flat.scatter_reduce(0, lanes, values, f"a{update}", include_self=True)
        if update == "xchg":
            order, last = last_of_runs(lanes)
            return flat.index_put((lanes[order[last]],), values[order[last]])
        if update in ("and", "or", "xor"):
            return self._bitwise_in_order(update, flat, lanes, values)[0]
        raise KernelError(f"atomic {update} is not supported")

    def _bitwise_in_order(
        self, update: str, flat: torch.Tensor, lanes: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply lane after lane; returns the new memory and each lane's old value. For integers, and
        colliding lanes."""
        act: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
            "and": torch.bitwise_and,
            "or": torch.bitwise_or,
            "xor": torch.bitwise_xor,
            "add": torch.add,
            "max": torch.maximum,
            "min": torch.minimum,
            "xchg": lambda _, new: new,
        }
        now, old = flat.detach().clone(), torch.empty_like(values)
        for lane, at in enumerate(lanes.tolist()):
            old[lane] = now[at]
            now[at] = act[update](now[at], values[lane].detach())
        return now, old

    def _old_values(
        self,
        update: str,
        old: torch.Tensor,
        lanes: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """The values that an atomic found, as a block; masked lanes give 0."""
        if self.launch_programs > 1 and not self.ordered:
            raise NeedsOrder
        self.synchronised = True
        apart = lanes.numel() == lanes.unique().numel()
        found = old[lanes] if apart else self._bitwise_in_order(update, old, lanes, values)[1]
        if mask is None:
            return found.reshape(shape)
        block = old.new_zeros(shape)
        return block.masked_scatter(mask.expand(shape), found)

    # ---- dependencies between programs

    def _save(self, cell: Cell) -> None:
        if cell not in self._group_start:
            track = self.tracks.get(id(cell))
            self._group_start[cell] = (cell.flat, track.clone() if track else None)
        self._launch_start.setdefault(cell, cell.flat)

    def _track(self, cell: Cell) -> Track:
        track = self.tracks.get(id(cell))
        if track is None:
            spans = [Span.empty(cell.numel, self.device) for _ in range(3)]
            track = Track(spans[0], spans[1], spans[2])
            self.tracks[id(cell)] = track
        for read in self.reads[track.reads_seen :]:
            if read.cell is cell:
                shape = (read.programs.numel(), *read.index.shape[1:])
                program = lane_view(read.programs, len(shape) - 1).expand(shape).reshape(-1)
                index = read.index.expand(shape).reshape(-1)
                if read.mask is not None:
                    chosen = read.mask.expand(shape).reshape(-1)
                    index, program = index[chosen], program[chosen]
                track.read.add(index, program)
        track.reads_seen = len(self.reads)
        return track

    def _note_read(
        self, cell: Cell, index: torch.Tensor, mask: torch.Tensor | None, ptr: Pointer, active: int
    ) -> None:
        batch = index.shape[0]
        self.counts.bytes_read += active * cell.itemsize * (self.programs.numel() // batch)
        if self.launch_programs == 1:
            return
        track = self.tracks.get(id(cell))
        if track is not None:
            program = lane_view(self.programs, index.dim() - 1)
            foreign = track.stored.others(index, program)
            updated = track.updated.others(index, program)
            if mask is not None:
                foreign, updated = foreign & mask, updated & mask
            self._conflict(foreign, "reads what another program writes", ptr)
            self._conflict(updated, "reads what other programs update atomically", ptr)
        self.reads.append(Read(cell, index, mask, self.programs))

    def _conflict(self, found: torch.Tensor, what: str, ptr: Pointer) -> None:
        if not bool(found.any()):
            return
        if not self.ordered:
            raise NeedsOrder
        if not self.synchronised:
            self._race(f"one program {what}: {ptr.name or 'a tensor'}")

    def _race(self, what: str) -> None:
        self._note(self.counts.races, what)

    def _note(self, sentences: list[str], what: str) -> None:
        sentence = f"{self.where()}: {what}"
        if sentence not in sentences:
            sentences.append(sentence)


def last_of_runs(lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that sorts addresses, and which places in it are the last of theirs."""
    order = torch.argsort(lanes, stable=True)
    last = torch.ones_like(order, dtype=torch.bool)
    last[:-1] = lanes[order][1:] != lanes[order][:-1]
    return order, last


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise inequality in which two NaN are equal."""
    different = a != b
    if a.dtype.is_floating_point:
        different &= ~(torch.isnan(a) & torch.isnan(b))
    return different
