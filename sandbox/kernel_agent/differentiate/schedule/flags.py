"""Flags that are known before a launch: those on which gradient addresses depend, so that a proof may hold on
one side of them and fail on the other.
"""

from __future__ import annotations

import re

from ..ir.nodes import GradWrite, Node, nodes_in
from ..ir.spelling import on_host
from ..ir.values import positive, signature
from ..read.trace import Site


def asked_of(site: Site, found: list[GradWrite]) -> list[Node]:
    """The flags of a launch that the addresses and masks of its atomic adds depend on, or that they stand
    under."""
    flags: dict[tuple, Node] = {}
    for write in (w for w in found if w.kind == "atomic_add"):
        regions = list(write.region.chain())
        bounds = [n for region in regions for n in region.bounds or ()]
        nodes = nodes_in([n for n in (write.offset, write.mask, *bounds) if n is not None])
        conditions = [n.args[0] for n in nodes if n.op == "ifout" and n.attrs["if"].static]
        conditions += [r.cond for r in regions if r.cond is not None]
        flags |= {signature(flag): flag for flag in map(positive, conditions) if _of_launch(site, flag)}
    return list(flags.values())


def _of_launch(site: Site, flag: Node) -> bool:
    """Whether the arguments of a launch decide a condition, and the host can ask for it."""
    named = [n.attrs["name"] for n in nodes_in([flag]) if n.op in ("constexpr", "param")]
    runtime = any(n.op == "param" and n.dtype != "pointer" for n in nodes_in([flag]))
    return on_host(flag) and bool(named) and not runtime and set(named) <= set(site.args)


def added(found: list[GradWrite], flag: Node, answer: bool) -> int:
    """How many atomic adds calls make that give a flag this answer."""

    def made(write: GradWrite) -> bool:
        asked = [r for r in write.region.chain() if r.cond is not None and positive(r.cond) is flag]
        return all((r.cond is flag) == (r.positive == answer) for r in asked)

    return sum(w.kind == "atomic_add" and made(w) for w in found)


def ending(flag: Node, answer: bool) -> str:
    """What the name of a kernel for one side of a flag ends with."""
    if flag.op == "constexpr":
        name = re.sub("^(is|has|use)_", "", flag.attrs["name"].lower())
        return f"_{'with' if answer else 'without'}_{name}"
    if flag.op == "isnone" and flag.args[0].op == "param":
        return f"_{'without' if answer else 'with'}_{flag.args[0].attrs['name'].lower()}"
    return "_then" if answer else "_else"
