"""Flags that are known before a launch: those on which gradient addresses depend, so that a proof may hold on
one side of them and fail on the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..ir.nodes import GradWrite, Node, nodes_in
from ..ir.spelling import on_host
from ..ir.values import positive, signature
from ..read.trace import Site

Answers = tuple[tuple[Node, bool], ...]  # flags, each with the answer that a call gives it


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


def together(asked: list[Node], known: int) -> list[Answers]:
    """Answers to all of these flags at once: every flag has both answers in one of them each, and where two
    may be known (`known`), every two flags have all four pairs of answers."""
    every = range(len(asked))
    ones = [[True for _ in every]]
    if known > 1:  # two flags differ in some bit of their numbers
        ones += [[bool(i >> bit & 1) for i in every] for bit in range((len(asked) - 1).bit_length())]
    rows = [[answer is side for answer in row] for row in ones for side in (True, False)]
    return [tuple(zip(asked, row, strict=True)) for row in rows]


def added(found: list[GradWrite], answers: Iterable[tuple[Node, bool]]) -> int:
    """How many atomic adds calls make that give flags these answers."""
    known = dict(answers)

    def made(write: GradWrite) -> bool:
        conditions = [
            (r.cond, positive(r.cond), r.positive) for r in write.region.chain() if r.cond is not None
        ]
        return all(
            (cond is flag) == (side == known[flag]) for cond, flag, side in conditions if flag in known
        )

    return sum(w.kind == "atomic_add" and made(w) for w in found)


def ending(flag: Node, answer: bool) -> str:
    """What the name of a kernel for one side of a flag ends with."""
    if flag.op == "constexpr":
        name = re.sub("^(is|has|use)_", "", flag.attrs["name"].lower())
        return f"_{'with' if answer else 'without'}_{name}"
    if flag.op == "isnone" and flag.args[0].op == "param":
        return f"_{'without' if answer else 'with'}_{flag.args[0].attrs['name'].lower()}"
    return "_then" if answer else "_else"
