"""Record what one call of a stub does: torch operations, kernel launches, and the bytes that it starts from.

The stub runs for real, with its own dtypes and devices, so nothing about it has to be guessed. `Recorder`
sits below autograd (a dispatch mode), where every torch operation has a schema that says what it reads,
writes and aliases. Tensors are noted by storage (`Ref`), so views, slices and in-place writes need no care:
two tensors alias if their storages are one. The tape is evaluated, in any precision, by `replay`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.launches import benchmarking
from kernel_agent.modes import Mode
from kernel_agent.source import words

UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# Operations whose result depends on their tensors' shapes only. Others that draw random numbers (dropout) are
# evaluated again; if they draw differently, the outputs differ, which the verdict sees.
RANDOM = words(
    """rand_like randn_like randint_like bernoulli normal uniform exponential random cauchy geometric
    log_normal multinomial poisson"""
)
CONSTANT = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}


@dataclass(frozen=True)
class Ref:
    """A tensor as a window on a storage. `key` identifies the storage within its tape."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    detached: bool = False


@dataclass
class Constant:
    """A storage's content at this point, not computed from anything: `flat` is a copy or None (not set)."""

    key: int
    flat: torch.Tensor | None
    dtype: torch.dtype
    numel: int
    base: int


@dataclass
class Operation:
    """A torch operation. Tensors in `args` and `kwargs` are Refs; `outputs` has one entry for each flattened
    result, None if it is an alias or no tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Ref | None]
    line: int | None
    storages: dict[int, tuple[int, int]]


@dataclass
class KernelLaunch:
    """A launch; tensors in `args` are Refs, descriptors are DescriptorRefs."""

    name: str
    function: Callable[..., Any]
    grid: tuple[int, ...]
    args: dict[str, Any]


@dataclass(frozen=True)
class DescriptorRef:
    base: Ref
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str


@dataclass
class Tape:
    """Entries in the order of the call. `alive` keeps storages, so that addresses and keys stay unique."""

    device: torch.device  # of the call; the tape may be evaluated on another
    wide: bool = False  # its operations turned out to be too wide for the CPU
    entries: list[Constant | Operation | KernelLaunch] = field(default_factory=list)
    alive: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)  # floating ones that want no gradient
    one_by_one: list[bool] | None = None  # what the first evaluation found of each launch; None before
    met: list[bool] | None = None  # and of each store: whether lanes met at one address

    @property
    def launches(self) -> int:
        return sum(isinstance(entry, KernelLaunch) for entry in self.entries)

    @property
    def programs(self) -> int:
        return sum(math.prod(entry.grid) for entry in self.entries if isinstance(entry, KernelLaunch))


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that a torch operation writes, in the order of its schema."""
    for at, formal in enumerate(function._schema.arguments if function._schema.is_mutable else ()):
        if formal.alias_info is not None and formal.alias_info.is_write:
            yield kwargs.get(formal.name) if formal.kwarg_only or at >= len(args) else args[at]


class Recorder(Mode):
    """Use as a context around the stub's call, with `on_launch` as the handler of its kernel launches.

    `inputs` are the tensors that the call starts from. After the call, `ref(output)` names what it returned.
    """

    def __init__(self, file: str, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.file = file
        self.tape = Tape(inputs[0].device if inputs else torch.device("cpu"))
        self.computed: set[int] = set()
        for tensor in inputs:
            ref = self.ref(tensor)
            self.tape.inputs.add(ref.key)
            self.computed.add(ref.key)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Name a tensor; a storage that was not seen before becomes a constant with its content now."""
        if tensor.layout != torch.strided:
            raise TypeError(f"a tensor with layout {tensor.layout} cannot be followed")
        key = self._key(tensor)
        if key not in self.tape.alive:
            self._constant(tensor)
        return self._ref(tensor, key)

    def note_frozen(self, tensors: Iterable[torch.Tensor]) -> None:
        """After the call: of what it was given, the floating tensors that want no gradient."""
        keys = {self._key(tensor) for tensor in tensors if tensor.is_floating_point()}
        self.tape.frozen = (keys & set(self.tape.alive)) - self.tape.inputs

    def on_launch(self, launch: Any) -> Any:
        """Note a kernel launch (forward.Launch), then run it for real."""
        with _disable_current_modes():
            args = {name: self._launch_value(value) for name, value in launch.args.items()}
            self.tape.entries.append(KernelLaunch(launch.name, launch.fn, tuple(launch.grid), args))
            self.computed.update(leaf.key for leaf in self._refs_in(args))
            return launch.run()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if benchmarking():  # an autotuner at work: its buffers are large, and none of the user's business
            return func(*args, **kwargs)
        noted_args, noted_kwargs = tree_map_only(torch.Tensor, self.ref, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = [leaf for leaf in made if self._key(leaf) not in self.tape.alive]
        read = self._refs_in((noted_args, noted_kwargs))
        self._pass_detachment(func, read, made)
        changed = [
            id(leaf)
            for actual in written_arguments(func, noted_args, noted_kwargs)
            for leaf in tree_leaves(actual)
        ]
        written = [ref for ref in read if id(ref) in changed]
        if not fresh and not written:
            return result
        if self._stands_for_itself(func, read, fresh, written):
            self._take_content(func, args, kwargs, fresh, written)
        else:
            outputs = [self._output(leaf, fresh) for leaf in tree_leaves(result)]
            touched = [ref for ref in outputs if ref is not None] + written
            storages = {ref.key: self._extent(ref.key, ref.dtype) for ref in touched}
            operation = Operation(func, noted_args, noted_kwargs, outputs, self._line(), storages)
            self.tape.entries.append(operation)
            self.computed.update(storages)
        return result

    # ---- storages

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _ref(self, tensor: torch.Tensor, key: int) -> Ref:
        detached = getattr(tensor, "_kernel_agent_detached", False)
        where = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        return Ref(key, tensor.dtype, *where, detached)

    def _extent(self, key: int, dtype: torch.dtype) -> tuple[int, int]:
        """Address and number of elements of a storage."""
        storage = self.tape.alive[key]
        return storage.data_ptr(), storage.nbytes() // dtype.itemsize

    def _constant(self, tensor: torch.Tensor, uninitialised: bool = False) -> None:
        key, dtype = self._key(tensor), tensor.dtype
        self.tape.alive[key] = tensor.untyped_storage()
        base, numel = self._extent(key, dtype)
        flat = None
        if not uninitialised:
            with _disable_current_modes():
                whole = torch.empty(0, dtype=dtype, device=tensor.device)
                flat = whole.set_(tensor.untyped_storage(), 0, (numel,), (1,)).clone()
        self.tape.entries.append(Constant(key, flat, dtype, numel, base))

    # ---- operations

    def _stands_for_itself(
        self, func: Any, read: list[Ref], fresh: list[torch.Tensor], written: list[Ref]
    ) -> bool:
        """Whether the result is taken as it is: it is random, made of nothing, or of integers (which have no
        gradient and must agree with the real call's control flow)."""
        name = func.overloadpacket.__name__
        if name.rstrip("_") in RANDOM or name in UNINITIALISED | CONSTANT or not read:
            return True
        results = [leaf.dtype for leaf in fresh] + [ref.dtype for ref in written]
        return not any(dtype.is_floating_point for dtype in results)

    def _take_content(
        self, func: Any, args: Any, kwargs: Any, fresh: list[torch.Tensor], written: list[Ref]
    ) -> None:
        for leaf in fresh:
            self._constant(leaf, func.overloadpacket.__name__ in UNINITIALISED and leaf.is_floating_point())
        for ref in written:
            leaf = next(leaf for leaf in tree_leaves((args, kwargs)) if self._is_window(leaf, ref))
            if ref.dtype.is_floating_point:
                # Only the window is overwritten: what else is in the storage keeps its gradient.
                storages = {ref.key: self._extent(ref.key, ref.dtype)}
                copied = (ref, leaf.detach().clone())
                entry = Operation(torch.ops.aten.copy_.default, copied, {}, [None], self._line(), storages)
                self.tape.entries.append(entry)
            else:
                self._constant(leaf)

    def _is_window(self, leaf: Any, ref: Ref) -> bool:
        return isinstance(leaf, torch.Tensor) and self._ref(leaf, self._key(leaf)) == ref

    def _output(self, leaf: Any, fresh: list[torch.Tensor]) -> Ref | None:
        if not any(leaf is new for new in fresh):
            return None
        key = self._key(leaf)
        self.tape.alive[key] = leaf.untyped_storage()
        return self._ref(leaf, key)

    def _pass_detachment(self, func: Any, read: list[Ref], made: list[torch.Tensor]) -> None:
        """Views of a detached tensor are detached; so is what detach() makes of a computed one."""
        cut = func.overloadpacket.__name__ in ("detach", "detach_")
        for leaf in made:
            sources = [ref for ref in read if ref.key == self._key(leaf)]
            if any(ref.detached or (cut and ref.key in self.computed) for ref in sources):
                leaf._kernel_agent_detached = True  # type: ignore[attr-defined]

    def _refs_in(self, tree: Any) -> list[Ref]:
        leaves = (leaf.base if isinstance(leaf, DescriptorRef) else leaf for leaf in tree_leaves(tree))
        return [leaf for leaf in leaves if isinstance(leaf, Ref)]

    def _launch_value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        if isinstance(value, TensorDescriptor):
            parts = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
            return DescriptorRef(self.ref(value.base), *parts, padding=getattr(value, "padding", "zero"))
        if isinstance(value, (tuple, list)):
            items = [self._launch_value(item) for item in value]
            return type(value)(*items) if hasattr(type(value), "_fields") else tuple(items)
        return value

    def _line(self) -> int | None:
        """The user's line that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return frame.f_lineno
            frame = frame.f_back
        return None
