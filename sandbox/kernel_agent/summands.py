"""Which numbers the host's sums add up: one that is added several times has been multiplied.

Every number that came from the upstream has a label, drawn at random. Views and moves carry labels along, and
a sum's label is the sum of what it added, so that it does not matter by which steps a number came twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "_to_copy", "copy_", "cat", "stack", "constant_pad_nd", "flip", "repeat", "index", "index_select",
    )
)  # fmt: skip
_SUM = "aten::sum"
_ADDS = frozenset({"aten::add", "aten::add_"})
TOLD = "aten::sum of one number several times"


class Summands:
    """Labels of storages, by their first byte. Storages that have labels are kept."""

    def __init__(self) -> None:
        self._labels: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._drawn = torch.Generator().manual_seed(0)  # labels are to differ, nobody has to guess them
        self._most = 1

    def begins(self, upstreams: Iterable[torch.Tensor]) -> None:
        """An upstream of stride 0 has each number several times as it comes."""
        for upstream in upstreams:
            self._most = max(self._most, _most_often(self._of(upstream).reshape(1, -1)))

    def wrote(self, storages: Iterable[int]) -> None:
        """New numbers stand there."""
        for start in storages:
            self._labels.pop(start, None)

    def operation(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: list[torch.Tensor],
        result: Any,
    ) -> str | None:
        """Follows a torch operation; its name where it adds a number more often than the upstream has it."""
        told = None
        if not (isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel()):
            return None
        if name == _SUM:
            groups = self._groups(args, kwargs, result)
            told = TOLD if _most_often(groups) > self._most else None
            self._keep(result, groups.sum(-1).reshape(result.shape))
        elif name in _ADDS and _are_alike(args[:2]):
            groups = torch.stack([self._of(tensor).reshape(-1) for tensor in args[:2]], -1)
            told = TOLD if _most_often(groups) > self._most else None
            self._view(result).copy_(groups.sum(-1).reshape(result.shape))
        elif name in _MOVES:
            moved, options = tree_map(self._label, (args, kwargs))
            if name == "aten::copy_":
                self._view(changed[0]).copy_(moved[1])
            else:
                self._keep(result, self._moved(name, moved, options, result))
        else:
            self.wrote(tensor.untyped_storage().data_ptr() for tensor in changed)
        return told

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> torch.Tensor:
        if name in ("aten::clone", "aten::_to_copy"):
            return args[0]  # whatever memory format and type
        if name == "aten::constant_pad_nd":
            args = args[:2]
        return getattr(torch.ops.aten, name.removeprefix("aten::"))(*args, **kwargs)

    def _groups(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> torch.Tensor:
        """Labels, a row for each number of the sum."""
        labels = self._of(args[0])
        axes = args[1] if len(args) > 1 else kwargs.get("dim")
        if labels.dim() == 0 or not axes:
            return labels.reshape(1, -1)
        summed = sorted(axis % labels.dim() for axis in axes)
        kept = [axis for axis in range(labels.dim()) if axis not in summed]
        return labels.permute(kept + summed).reshape(result.numel(), -1)

    def _label(self, value: Any) -> Any:
        """In place of a floating tensor its labels."""
        return self._of(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._view(tensor).clone()

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The labels of a tensor's memory, to be read or written."""
        memory = tensor.untyped_storage()
        known = self._labels.get(memory.data_ptr())
        if known is None or known[0].element_size() != tensor.element_size():
            count = memory.nbytes() // tensor.element_size()
            drawn = torch.randint(-(2**62), 2**62, (count,), generator=self._drawn)
            self._labels[memory.data_ptr()] = (tensor, drawn)
        labels = self._labels[memory.data_ptr()][1]
        return labels.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _keep(self, result: torch.Tensor, labels: torch.Tensor) -> None:
        self._labels.pop(result.untyped_storage().data_ptr(), None)
        self._view(result).copy_(labels)


def _are_alike(values: tuple[Any, ...]) -> bool:
    """Two floating tensors of one shape and element size."""
    a, b = values
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and b.is_floating_point()
    return tensors and a.shape == b.shape and a.element_size() == b.element_size()


def _most_often(rows: torch.Tensor) -> int:
    """How often a row has one label at most; what padding put there has none."""
    if not rows.numel():
        return 0
    ordered = rows.sort(-1).values
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    at = begins.reshape(-1).nonzero().reshape(-1)
    lengths = torch.cat((at, at.new_tensor([ordered.numel()]))).diff()
    lengths = lengths[ordered.reshape(-1)[at] != 0]
    return int(lengths.max()) if lengths.numel() else 0
