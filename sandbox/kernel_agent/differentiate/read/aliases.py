"""What a kernel writes and reads by one buffer: at the same place before, or not at all; other reads have to
be proven apart (`prove.overwrite`).
"""

from __future__ import annotations

from itertools import combinations

from ..ir import address_tables
from ..ir.nodes import Node, Region, Store
from ..ir.refusal import Refusal
from ..ir.values import is_static
from . import language
from .kernel_values import Access, Values

Condition = tuple[Node | None, bool]  # and whether it holds


class Aliases(Values):
    """Refuses stores whose gradient would go astray, and notes reads to be proven apart."""

    def _check_aliases(self) -> None:
        """What is written is read at the same address before, or not at all; other reads of the buffer have
        to be proven apart (`prove.overwrite`)."""
        pairs: list[tuple[Store, Access]] = []
        for store in self.stored:
            base = store.base
            for read in self.loaded:
                other, offset, mask, _ = read
                name, behind = base.attrs["name"], address_tables.storages(self.args, base)
                if base.attrs["none"] or other.attrs["none"]:
                    continue
                if base is not other and not behind & address_tables.storages(self.args, other):
                    continue
                if store.region.excludes(read[3], is_static):
                    continue
                if base is not other and (self.untaken(read[3]) or self.untaken(store.region)):
                    continue
                pairs.append((store, read))
                if base is other and base.op == "param" and name not in self.added:
                    if store.offset is offset and store.mask is mask:
                        self._check_place(store, offset, read[3])
                        self.inplace.add(name)
                    continue
                message = (
                    f"`{name}` is written and read by one kernel, which adds to it or finds it in a table"
                )
                if base is not other:
                    message = f"`{name}` is written and read, as `{other.attrs['name']}`, by one kernel"
                raise Refusal("in-place access", message, "Write the result to its own buffer.", store.line)
        for store, (_, offset, mask, region) in pairs:
            if store.offset is not offset or store.mask is not mask:
                self.apart.append((store, offset, mask, region))
        loaded = dict.fromkeys(read[:3] for _, read in pairs)
        blind = {s for s, _ in pairs if s.value.is_float and (s.base, s.offset, s.mask) not in loaded}
        self._read_before([s for s in self.stored if s in blind])

    def untaken(self, region: Region) -> bool:
        """Whether a flag rules out in the traced call what stands here: a tensor that it has no use for may
        be any other then."""
        asked = ((self.decided(cond), positive) for cond, positive in _branches(region) if cond is not None)
        return any(found is not None and found is not positive for found, positive in asked)

    def _check_place(self, store: Store, offset: Node, region: Region) -> None:
        """Refuse a store whose load, at its address, may see it in another step or under other conditions."""
        name = store.base.attrs["name"]
        loops = [r for r in store.region.chain() if r.is_loop and region.inside(r)]
        if any(not offset.home.inside(loop) for loop in loops):
            message = f"`{name}` is written and read at one address in every step of a loop"
            remedy = "Carry the value in a variable, and store it after the loop."
            raise Refusal("in-place access", message, remedy, store.line)
        same = [
            s for s in self.stored if (s.base, s.offset, s.mask) == (store.base, store.offset, store.mask)
        ]
        if _branches(region) not in _conditions([_branches(s.region) for s in same]):
            message = f"`{name}` is read in one branch and written in another, or in none"
            remedy = "Load and store it under the same conditions, or write to a buffer of its own."
            raise Refusal("in-place access", message, remedy, store.line)

    def read_before(self, name: str) -> None:
        """Let every store to a buffer read it first, to no avail: what it overwrites has the gradient 0."""
        self._read_before([s for s in self.stored if s.base.attrs["name"] == name])
        self.inplace.add(name)

    def _read_before(self, stores: list[Store]) -> None:
        g = self.g
        for store in stores:
            store.base.active = True
            args = [n for n in (store.base, store.offset, store.mask) if n is not None]
            args += [g.number(0)] * (store.mask is not None)
            with g.at(store.region):
                attrs = {"other": store.mask is not None}
                old = g.make("load", args, attrs, language.element(store.base), store.offset.shape)
                old.active = True
                store.value = g.make("over", (store.value, old), {}, store.value.dtype, store.value.shape)
            self.inplace.add(store.base.attrs["name"])


def _branches(region: Region) -> frozenset[Condition]:
    """The conditions that something stands under."""
    return frozenset((r.cond, r.positive) for r in region.chain() if r.cond is not None)


def _conditions(stores: list[frozenset[Condition]]) -> set[frozenset[Condition]]:
    """Conditions under which something is stored: those of each store, and those around an `if` of which both
    branches store."""
    found: set[frozenset[Condition]] = set()
    new = set(stores)
    while new:
        found |= new
        parted = [(a & b, a ^ b) for a, b in combinations(found, 2)]
        new = {both for both, apart in parted if len(apart) == 2 and len(dict(apart)) == 1} - found
    return found
