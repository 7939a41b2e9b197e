"""Gradients, and parts of them, that no kernel has to compute: they are the upstream itself, as a residual's
is, or nothing but torch operations of the stub's own lies between an input and the outputs.

The oracle says so of what it expects. A candidate may hand such on as it comes (agent/run/judge.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.utils._pytree import tree_leaves

from ..torch_tl.record import Constant, DescriptorRef, KernelLaunch, Ref, Tape

_LEAST = 1 / 16  # of a gradient's numbers: what chance makes equal is not told


def without_kernels(tape: Tape, wanted: Mapping[str, Ref]) -> list[str]:
    """Names of the inputs of which no launch was given anything, nor what torch made of them."""
    return [name for name, ref in wanted.items() if not _is_launched_with(tape, ref.key)]


def _is_launched_with(tape: Tape, key: int) -> bool:
    hang = {key}
    for entry in tape.entries:
        if isinstance(entry, Constant):
            continue
        given = entry.args if isinstance(entry, KernelLaunch) else (entry.args, entry.kwargs)
        if not hang & {ref.key for ref in _refs(given)}:
            continue
        if isinstance(entry, KernelLaunch):
            return True
        hang |= set(entry.storages)
    return False


def _refs(tree: object) -> Iterable[Ref]:
    leaves = (leaf.base if isinstance(leaf, DescriptorRef) else leaf for leaf in tree_leaves(tree))
    return (leaf for leaf in leaves if isinstance(leaf, Ref))


def passed_on(
    gradient: torch.Tensor, dtype: torch.dtype, upstreams: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """In `dtype`, the elements of a gradient that are those of an upstream of as many elements, each at its
    own place; NaN elsewhere. None where that is less than one in sixteen."""
    flat = gradient.reshape(-1)
    found = torch.full_like(flat, torch.nan)
    for upstream in upstreams:
        if upstream.numel() == flat.numel():
            wide = upstream.reshape(-1).to(flat)
            found = torch.where(flat == wide, wide, found)
    numbers = int(flat.count_nonzero())
    same = int((found.isfinite() & (found != 0)).sum())
    if numbers == 0 or same < _LEAST * numbers:
        return None
    return found.reshape(gradient.shape).to(dtype)
