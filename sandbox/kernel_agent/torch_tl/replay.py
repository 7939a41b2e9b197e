"""Evaluates a recorded call again, with gradients: in float64 (`exact`) or in its own dtypes (`native`).

Every storage of the tape becomes a `Cell`. A tensor is read as a window on its cell and written by replacing
the cell's flat tensor, so that views and in-place operations are differentiated as what they do to memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from kernel_agent.modes import Mode
from kernel_agent.torch_tl.handles import EXACT, KernelError
from kernel_agent.torch_tl.kinks import Kinks
from kernel_agent.torch_tl.launch import DescriptorArg, Launch, TensorArg, run_launch
from kernel_agent.torch_tl.maxima import Maxima
from kernel_agent.torch_tl.memory import Cell, Memory, cell_values
from kernel_agent.torch_tl.record import (
    Constant,
    DescriptorRef,
    KernelLaunch,
    Operation,
    Ref,
    Tape,
    written_arguments,
)

ASIDE, FROM_ZERO = 1e-10, 1e-30


class Replay:
    """One evaluation of a tape. The first that gets to its end has looked at every access for all that follow
    (memory.py). `leaves` are the flat inputs, by storage key, that gradients are taken for.

    With `jitter` (a seed) every floating input is first moved by up to `reach` units in the last place of its
    dtype, to a value of that dtype. One unit: how far the gradients then move is what no kernel that computes
    in that dtype can resolve. Many: the same computation with other rounding errors, of which what wants no
    gradient has its share, so it moves too. None at all (0): far less than a unit, in float64, and away from
    zero: what was equal no longer is. With several seeds as many copies of the tape are evaluated at once,
    each at inputs of its own (memory.py); KernelError where that cannot be, or would round otherwise.

    `masked`: see Masked. `kinks` notes, or decides, the comparisons of floats (kinks.py), and `maxima` what
    arrives at maxima, or that nothing does (maxima.py).
    """

    def __init__(
        self,
        tape: Tape,
        precision: str,
        device: torch.device | str,
        file: str | None = None,
        jitter: int | Sequence[int] | None = None,
        reach: float = 1,
        masked: bool = False,
        kinks: Kinks | None = None,
        maxima: Maxima | None = None,
    ) -> None:
        self.masked = masked
        self.reach = reach
        seeds = [] if jitter is None else [jitter] if isinstance(jitter, int) else list(jitter)
        self.jitter = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.copies = max(1, len(seeds))
        self.tape = tape
        self.precision = precision
        self.file = file
        compiled = tape.device.type == "cuda"
        checked = tape.one_by_one is None
        assert not checked or self.copies == 1, "copies are of what was evaluated"
        self.memory = Memory(precision, device, checked, tape.met, compiled, self.copies)
        self.memory.kinks = kinks
        self.memory.maxima = maxima
        self.cells: dict[int, Cell] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.one_by_one: list[bool] = []  # of each launch so far

    def run(self) -> None:
        """Evaluate all entries. Raises KernelError, also where copies do not go the way of the first
        evaluation: of its stores it is known which lanes meet."""
        for entry in self.tape.entries:
            if isinstance(entry, Constant):
                self._constant(entry)
            elif isinstance(entry, Operation):
                self._operation(entry)
            else:
                self._launch(entry)
        if self.tape.one_by_one is None:
            self.tape.one_by_one = self.one_by_one
            self.tape.met = self.memory.met
        if self.memory.stores != len(self.tape.met or ()):
            self.memory.require_single("another way through the kernels")

    def value(self, ref: Ref, copy: int = 0) -> torch.Tensor:
        """What a tensor holds now: floats in float64 when exact, else everything in its own dtype."""
        cell = self.cells[ref.key]
        if ref.dtype != cell.dtype:
            raise KernelError(
                f"a {cell.dtype} tensor is viewed as {ref.dtype}", remedy="bit casts have no gradient"
            )
        data = window(self._part(cell, copy), ref)
        if ref.detached:
            data = data.detach()
        if not ref.dtype.is_floating_point:
            return data.view(ref.dtype)
        return data if self.precision == EXACT else data.to(ref.dtype)

    def _part(self, cell: Cell, copy: int) -> torch.Tensor:
        """The elements of a copy."""
        return cell.flat if self.copies == 1 else cell.flat.chunk(self.copies)[copy]

    def gradients(
        self, outputs: list[tuple[Ref, torch.Tensor]], wanted: dict[str, Ref]
    ) -> dict[str, torch.Tensor]:
        """The vector-Jacobian product of (output, upstream) pairs for each wanted input; zeros where there is
        no path."""
        return self.each_gradients(outputs, wanted)[0]

    def each_gradients(
        self, outputs: list[tuple[Ref, torch.Tensor]], wanted: dict[str, Ref]
    ) -> list[dict[str, torch.Tensor]]:
        """The same of each copy."""
        values = [(self.value(ref, at), up) for at in range(self.copies) for ref, up in outputs]
        pairs = [(value, upstream.to(value)) for value, upstream in values if value.requires_grad]
        keys = list(dict.fromkeys(ref.key for ref in wanted.values()))
        flats: list[torch.Tensor | None] = [None] * len(keys)
        if pairs:
            flats = vector_jacobian(pairs, [self.leaves[key] for key in keys], self.masked)
        found = {
            key: torch.zeros_like(self.leaves[key]) if flat is None else flat
            for key, flat in zip(keys, flats, strict=True)
        }
        parts = {key: flat.chunk(self.copies) for key, flat in found.items()}
        return [
            {name: window(parts[ref.key][at], ref) for name, ref in wanted.items()}
            for at in range(self.copies)
        ]

    def release(self) -> None:
        """Let go of all memory now. The kernels' code and this evaluation know each other, and a collection
        may be far away: on a GPU memory is what limits the shapes."""
        for cell in self.memory.cells:
            cell.flat = cell.flat.new_empty(0)
        self.memory = Memory(self.precision, self.memory.device)
        self.cells.clear()
        self.leaves.clear()

    # ---- entries

    def _constant(self, entry: Constant) -> None:
        real = entry.flat
        if real is None:
            real = torch.full((entry.numel,), torch.nan, dtype=entry.dtype, device=self.memory.device)
        flat = cell_values(real.to(self.memory.device), self.precision)
        is_input = entry.key in self.tape.inputs and entry.key not in self.leaves
        if is_input and entry.dtype.is_floating_point:
            flat = self._moved(flat, entry.dtype)
            self.leaves[entry.key] = flat.requires_grad_()
        elif self.reach > 1 and entry.key in self.tape.frozen - self.cells.keys():
            flat = self._moved(flat, entry.dtype)
        else:
            flat = flat.repeat(self.copies) if self.copies > 1 else flat
        self._set(entry.key, flat, entry.dtype, entry.base)

    def _moved(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values as they are moved in each copy, if they are."""
        moved = [self._moved_by(drawn, flat, dtype) for drawn in self.jitter]
        return torch.cat(moved) if self.copies > 1 else moved[0] if moved else flat

    def _moved_by(self, drawn: torch.Generator, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values of `dtype` up to `reach` of its units away, drawn where the memory is. In float64, in one
        tensor of that size."""
        factors = torch.rand(flat.shape, generator=drawn, dtype=torch.float64, device=flat.device)
        factors.mul_(2).sub_(1)
        if self.reach == 0:
            return torch.where(flat == 0, FROM_ZERO * factors, flat * (1 + ASIDE * factors))
        factors.mul_(self.reach * torch.finfo(dtype).eps).add_(1)
        return factors.mul_(flat).to(dtype).to(flat.dtype)

    def _set(self, key: int, flat: torch.Tensor, dtype: torch.dtype, base: int) -> None:
        cell = self.cells.get(key)
        if cell is not None and cell.dtype == dtype:
            cell.flat = flat
        else:
            self.cells[key] = self.memory.add(Cell(flat, dtype, base))

    def _operation(self, entry: Operation) -> None:
        try:
            self._apply(entry)
        except KernelError:
            raise
        except Exception as error:
            raise KernelError(
                f"{entry.function} cannot be evaluated again in {self.precision} precision: {error}",
                file=self.file,
                line=entry.line,
            ) from error

    def _apply(self, entry: Operation) -> None:
        made = [self._results(entry, copy) for copy in range(self.copies)]
        for results in zip(*made, strict=True):
            self._write(results[0][0], [value for _, value in results], entry)

    def _results(self, entry: Operation, copy: int) -> list[tuple[Ref, torch.Tensor]]:
        """What an operation of a copy writes, in order."""
        values: dict[int, torch.Tensor] = {}

        def read(ref: Ref) -> torch.Tensor:
            values[id(ref)] = self.value(ref, copy)
            return values[id(ref)]

        args, kwargs = tree_map_only(Ref, read, (entry.args, entry.kwargs))
        if self.precision == EXACT:
            args, kwargs = tree_map(widen_dtype, (args, kwargs))
        if self.memory.device != self.tape.device:
            args, kwargs = tree_map(self._moved_here, (args, kwargs))
        written = written_refs(entry)
        if any(name in kwargs for name in out_names(entry.function)):
            return list(zip(written, functional(entry.function, args, kwargs), strict=True))
        made: list[tuple[Ref, torch.Tensor]] = []
        if written:
            copies = {id(values[id(ref)]): values[id(ref)].clone() for ref in written}
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), (args, kwargs)
            )
            results = tree_leaves(entry.function(*args, **kwargs))
            made = [(ref, copies[id(values[id(ref)])]) for ref in written]
        else:
            results = tree_leaves(entry.function(*args, **kwargs))
        pairs = zip(entry.outputs, results, strict=True)
        return made + [(output, result) for output, result in pairs if output is not None]

    def _moved_here(self, value: Any) -> Any:
        """Devices and tensors that are of the call, not of this evaluation."""
        if isinstance(value, torch.device):
            return self.memory.device
        return value.to(self.memory.device) if isinstance(value, torch.Tensor) else value

    def _write(self, ref: Ref, values: list[torch.Tensor], entry: Operation) -> None:
        """Put a tensor's new value, in each copy, into its cell, which is made if the storage is new."""
        base, numel = entry.storages[ref.key]
        parts = [self._written(ref, value, numel, copy) for copy, value in enumerate(values)]
        self._set(ref.key, parts[0] if self.copies == 1 else torch.cat(parts), ref.dtype, base)

    def _written(self, ref: Ref, value: torch.Tensor, numel: int, copy: int) -> torch.Tensor:
        """The elements of a copy's storage with a tensor's new value among them."""
        cell = self.cells.get(ref.key)
        if not ref.dtype.is_floating_point:
            flat_value = cell_values(value.to(ref.dtype).reshape(-1), self.precision).reshape(ref.size)
        else:
            wide = self.precision == EXACT or ref.dtype == torch.float64
            flat_value = value.to(torch.float64 if wide else torch.float32)
        whole = numel == flat_value.numel() and ref.offset == 0 and is_dense(ref)
        if whole:
            return flat_value.expand(ref.size).reshape(-1)
        before = flat_value.new_zeros(numel) if cell is None else self._part(cell, copy)
        return before.index_put((places(numel, ref, before.device),), flat_value.expand(ref.size))

    def _launch(self, entry: KernelLaunch) -> None:
        args = {name: self._argument(value) for name, value in entry.args.items()}
        known = self.tape.one_by_one
        one_by_one = known is not None and known[len(self.one_by_one)]
        launch = Launch(entry.function, entry.grid, args, entry.name)
        self.one_by_one.append(run_launch(launch, self.memory, one_by_one))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            cell = self.cells[value.key]
            return TensorArg(cell, cell.base + value.offset * cell.itemsize, value.dtype, value.detached)
        if isinstance(value, DescriptorRef):
            base = self._argument(value.base)
            return DescriptorArg(base, value.shape, value.strides, value.block_shape, value.padding)
        if isinstance(value, tuple):
            items = [self._argument(item) for item in value]
            return type(value)(*items) if hasattr(type(value), "_fields") else tuple(items)
        return value


class Masked(Mode):
    """In a backward: zero times anything is zero, and so is zero divided by anything.

    What a mask discards has the upstream gradient zero, and no part in any gradient, whatever is computed in
    its lanes: the root of a negative number, the logarithm of 0. IEEE's product of zero and infinity is NaN.
    """

    _PRODUCTS = (torch.ops.aten.mul, torch.ops.aten.mul_)
    _QUOTIENTS = (torch.ops.aten.div, torch.ops.aten.div_)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        factors = args[:2] if packet in self._PRODUCTS else args[:1] if packet in self._QUOTIENTS else ()
        zero = [factor == 0 for factor in factors if isinstance(factor, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        for nothing in zero:
            result.masked_fill_(nothing & result.isnan(), 0)
        return result


def vector_jacobian(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor], masked: bool = False
) -> list[torch.Tensor | None]:
    """Gradients of sum(value * upstream) over the pairs; None for a leaf that no value depends on. `masked`:
    see Masked."""
    # One scalar in place of grad_outputs, for which autograd would import torch's symbolic shapes (seconds).
    total = torch.stack([(value * upstream).sum().to(torch.float64) for value, upstream in pairs]).sum()
    with Masked() if masked else contextlib.nullcontext():
        return list(torch.autograd.grad(total, leaves, allow_unused=True))


def is_dense(ref: Ref) -> bool:
    """Row-major without gaps."""
    expected = 1
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def window(flat: torch.Tensor, ref: Ref) -> torch.Tensor:
    """The tensor that `ref` describes, as a view of the flat storage."""
    if is_dense(ref):
        return flat.narrow(0, ref.offset, math.prod(ref.size)).view(ref.size)
    return flat[places(flat.numel(), ref, flat.device)]


def places(numel: int, ref: Ref, device: torch.device) -> torch.Tensor:
    """Element numbers of the tensor's elements in its storage. (as_strided is not used on values: it acts on
    whatever memory is behind a tensor, which for a result of autograd need not be the flat storage.)"""
    return torch.arange(numel, device=device).as_strided(ref.size, ref.stride, ref.offset)


def widen_dtype(value: Any) -> Any:
    """A floating dtype argument asks for float64 in an exact evaluation."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def out_names(function: Any) -> list[str]:
    return [formal.name for formal in function._schema.arguments if formal.is_out]


def written_refs(entry: Operation) -> list[Ref]:
    """Refs of the arguments that the operation writes, in the order of its schema."""
    written = list(written_arguments(entry.function, entry.args, entry.kwargs))
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Ref)]


def functional(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Results of an `out=` operation by its sibling that returns them, which autograd knows."""
    outs = set(out_names(function))
    rest = {name: value for name, value in kwargs.items() if name not in outs}
    wanted = [(formal.name, str(formal.type)) for formal in function._schema.arguments if not formal.is_out]
    packet = function.overloadpacket
    for overload in packet.overloads():
        sibling = getattr(packet, overload)
        formals = [(formal.name, str(formal.type)) for formal in sibling._schema.arguments]
        if formals == wanted and not sibling._schema.is_mutable:
            return tree_leaves(sibling(*args, **rest))
    raise KernelError(f"{function} has no variant without out=")
