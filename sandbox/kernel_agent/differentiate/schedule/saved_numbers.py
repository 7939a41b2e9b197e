"""Numbers of every step, taped by the copy of the forward: the backward does not run that loop again.

    for j in range(k):
        winner = tl.argmax(left, axis=0)
        tl.store(tape_winner + program * tape_steps + j, winner)
        left = tl.where(experts == winner, -inf, left)

`reverse/kept_numbers.py` finds the numbers. What a step stores is what the forward computes there: a call in
a loop over `range(n)` in the body of the kernel, in no branch and no other loop, which makes it in every
step. Where the backward also needs what such a loop leaves, a block in a variable of the kernel, the copy
stores that too. It is done where none of these loops is left to run then, and no other tape; where the
programs of the backward are those of the forward, with its blocks; and where that is little, as it lives from
the forward to the backward.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..ir.graph import Graph
from ..ir.nodes import For, Node, TapeStore, nodes_in, operands, reachable, real, walk
from ..ir.rewriter import Rewriter
from ..ir.values import Kernel, StepCall, is_named
from ..read.trace import Site
from ..reverse import forward_values
from ..reverse.forward_values import Buffer, Tape
from ..reverse.sweep import Reverse
from . import saved

SHARE = 2  # the tensors of the launch have so many times the bytes that are kept, in the traced call
DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True)
class Taped:
    """A number that the copy stores in every step: `at` its call, of as many steps as `trips` at most."""

    at: StepCall
    trips: Node


@dataclass
class _Found:
    """What the copy is to store."""

    sources: list[For]
    stores: list[tuple[For, TapeStore]] = field(default_factory=list)
    alike: dict[str, str] = field(default_factory=dict)  # tapes of the same numbers, by the one that is kept
    ends: dict[Node, str] = field(default_factory=dict)  # what loops leave, with the variable


def use(reverse: Reverse, site: Site, tape: Tape, taken: set[str]) -> tuple[list[saved.Saved], int]:
    """Replace the tapes of a backward by those that the forward's copy stores: what it saves, and the bytes
    of it in the traced call; nothing, and 0, where that is not possible. `taken`: names of other buffers."""
    found = _find(reverse, site, tape)
    if found is None:
        return [], 0
    g, sources = reverse.kernel.graph, found.sources
    buffers = {buffer.name: buffer for buffer in tape.buffers}
    bytes_kept = sum(forward_values.size(buffers[s.buffer], site) for _, s in found.stores)
    for end in found.ends:
        kept = Buffer("", real(end.dtype), g.one, g.product(end.shape), "")
        bytes_kept += forward_values.size(kept, site)
    if bytes_kept * SHARE > _bytes_of_launch(site):
        return [], 0
    names = {name: name for name in found.alike}
    known = taken | saved.names_in(site.source) | {forward_values.STEPS}
    for store in (store for _, store in found.stores):
        names[store.buffer] = saved.free_name(store.buffer, known)
        known.add(names[store.buffer])
    made, loads = _tapes(reverse, site, found, buffers, names)
    for end, text in found.ends.items():
        name = saved.free_name(f"saved_{text}", known)
        known.add(name)
        made.append(saved.Saved(text, name, end.dtype, end.shape, g.product(end.shape)))
        loads[end] = _load(g, site, made[-1], end, None)
    effects = Rewriter(g, loads.get).effects(reverse.effects)
    if _needs(effects, set(sources)):
        return [], 0
    reverse.effects, tape.buffers = effects, []
    for source in sources:
        source.tape = []
        _tell(reverse, source)
    for end, text in found.ends.items():
        reverse.say(end.attrs["loop"].line, "saved", "none", f"`{text}` took a loop: the forward saves it")
    return made, bytes_kept


def _find(reverse: Reverse, site: Site, tape: Tape) -> _Found | None:
    """All that is taped, and what else the backward needs of those loops; None where the copy cannot store
    some of it, or not where the backward would look for it."""
    kernel, copied = reverse.kernel, saved.copies(site)
    if copied is None or copied.varied or copied.rows or site.blocks is not None or kernel.graph.answers:
        return None
    if forward_values.STEPS in saved.names_in(site.source):
        return None
    loops = [effect for effect in walk(reverse.effects) if isinstance(effect, For)]
    sources = list(dict.fromkeys(e.source for e in loops if e.source is not None and e.source.tape))
    stores = [(source, store) for source in sources for store in source.tape]
    slots = {buffer.slots for buffer in tape.buffers} | {forward_values.STEPS}
    if not stores or any(e.provides or e.waits for e in loops) or len(slots) > 1:
        return None
    if {store.buffer for _, store in stores} != {buffer.name for buffer in tape.buffers}:
        return None
    if not all(_is_of_every_step(kernel, source, store) for source, store in stores):
        return None
    certain, found = saved.certain_names(site.source), _Found(sources)
    variables = {node: name for name, node in kernel.variables.items() if name in certain}
    for end in _ends(reverse.effects, set(sources)):
        fits = end in variables and _is_kept_whole(end, 2) and end.home is kernel.graph.top
        if not fits or not _as_read(kernel, [end]):
            return None
        found.ends[end] = variables[end]
    for source, store in stores:
        same = (one.buffer for at, one in found.stores if _alike(kernel.graph, source, store, at, one))
        if (other := next(same, None)) is None:
            found.stores.append((source, store))
        else:
            found.alike[store.buffer] = other
    return found


def _is_of_every_step(kernel: Kernel, source: For, store: TapeStore) -> bool:
    """Whether a call of the forward makes what a step tapes, in a loop that is as it was read."""
    at = kernel.of_steps.get(store.value)
    return (
        at is not None
        and at.loop.lineno == source.line
        and source.region.kind == "for"
        and source.outer is kernel.graph.top
        and store.value.home is source.region
        and store.mask is None
        and _is_kept_whole(store.value, 1)
        and _as_read(kernel, [source, store.value])
    )


def _is_kept_whole(value: Node, axes: int) -> bool:
    """Whether a store of Triton can keep a value as it is."""
    sized = all(dim.op in ("const", "constexpr") for dim in value.shape)
    return real(value.dtype) in DTYPES and not is_named(value.dtype) and len(value.shape) <= axes and sized


def _as_read(kernel: Kernel, roots: list) -> bool:
    """Whether the loops that something hangs on carry what the kernel's text does: passes may have given one
    another start or another next step."""
    loops = [item for item in reachable(roots) if isinstance(item, For)]
    return all(kernel.carried.get(c.phi) == (c.init, c.next) for one in loops for c in one.carries)


def _ends(effects: list, sources: set[For]) -> list[Node]:
    """What a backward needs of what some loops leave, beside what they tape."""

    def leaves(item: object) -> bool:
        return isinstance(item, Node) and item.op == "loopout" and item.attrs["loop"] in sources

    items = reachable(effects, lambda item: [] if leaves(item) else _without_tapes(item))
    return [item for item in items if leaves(item)]


def _needs(effects: list, sources: set[For]) -> bool:
    """Whether a backward needs what steps of some loops carry, or leave."""
    phis = {carry.phi for source in sources for carry in source.carries}
    return any(item in sources or item in phis for item in reachable(effects, _without_tapes))


def _without_tapes(item: object) -> list:
    """What an item consists of, but for the loops that fill the tapes it reads."""
    parts = operands(item)
    return [part for part in parts if part is not item.source] if isinstance(item, For) else parts


def _alike(g: Graph, source: For, store: TapeStore, other: For, kept: TapeStore) -> bool:
    """Whether two loops over one range tape the same: both begin with the same, and go on in the same way."""
    if source is other or source.region is not other.region:
        return False
    partners = {carry.phi.attrs["name"]: carry for carry in other.carries}
    mine = {carry.phi: carry for carry in source.carries}
    table: dict[Node, Node] = {}
    rest = [node for node in nodes_in([store.value]) if node in mine]
    while rest:
        phi = rest.pop()
        partner = partners.get(phi.attrs["name"])
        if phi in table:
            continue
        if partner is None or partner.init is not mine[phi].init:
            return False
        if (partner.phi.dtype, partner.phi.shape) != (phi.dtype, phi.shape):
            return False
        table[phi] = partner.phi
        rest += [node for node in nodes_in([mine[phi].next]) if node in mine]
    rewriter, nexts = Rewriter(g, table.get), {carry.phi: carry.next for carry in other.carries}
    pairs = [(mine[phi].next, nexts[partner]) for phi, partner in table.items()]
    return all(a is not None and rewriter.node(a) is b for a, b in [*pairs, (store.value, kept.value)])


def _tapes(
    reverse: Reverse, site: Site, found: _Found, buffers: dict[str, Buffer], names: dict[str, str]
) -> tuple[list[saved.Saved], dict[Node, Node]]:
    """The tapes of the copy, and what to read of them in place of what is read now."""
    g = reverse.kernel.graph
    made: dict[str, saved.Saved] = {}
    for _, store in found.stores:
        at, buffer = reverse.kernel.of_steps[store.value], buffers[store.buffer]
        value, name = store.value, names[store.buffer]
        taped = Taped(at, buffer.trips)
        kept = saved.Saved(_text(at), name, value.dtype, value.shape, buffer.numel, taped=taped)
        made[store.buffer] = kept
    loads: dict[Node, Node] = {}
    for node in nodes_in(reverse.effects):
        if node.op == "load" and node.attrs.get("buffer") and node.args[0].attrs["name"] in buffers:
            tape = node.args[0].attrs["name"]
            kept = made[found.alike.get(tape, tape)]
            loads[node] = _load(g, site, kept, node, forward_values.step_number(g, node.home))
    return list(made.values()), loads


def _load(g: Graph, site: Site, kept: saved.Saved, old: Node, at: Node | None) -> Node:
    """What reads back what the copy stored, in a step `at`, or at the end."""
    reverse, g.reverse, g.line = g.reverse, old.reverse, old.line
    with g.at(old.home):
        number = saved.program_number(g, saved.ordered(site, None))
        if at is None:
            index = g.mul(number, kept.numel)
        else:
            first = g.mul(g.mul(number, g.param(forward_values.STEPS)), kept.numel)
            index = g.add(first, g.mul(at, kept.numel))
        for axis in range(len(kept.shape)):
            index = g.add(index, g.lanes(kept.shape, axis))
        attrs = {"other": False, "buffer": True, "saved": True}
        held = real(kept.dtype)
        new = g.make("load", (g.scratch(kept.buffer, held), index), attrs, held, kept.shape)
        new.hint = old.hint
        new = g.cast(new, kept.dtype)
    g.reverse = reverse
    new.hint = old.hint
    return new


def _text(at: StepCall) -> str:
    """What a number is called behind the statement that makes it, or how it is made."""
    return assigned(at) or ast.unparse(at.call)


def assigned(at: StepCall) -> str | None:
    """The variable that a statement assigns the number itself to."""
    match at.statement:
        case ast.Assign([ast.Name(name)], value) if value is at.call:
            return name
    return None


def _bytes_of_launch(site: Site) -> int:
    tensors = [v for v in site.launch.args.values() if isinstance(v, torch.Tensor)]
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


def _tell(reverse: Reverse, source: For) -> None:
    """Say of the numbers of a loop that the forward saves them."""
    for at, line in enumerate(reverse.report):
        if line.kind == "tape" and line.line == source.line:
            reason = line.reason.replace("a tape of those", "the forward saves a tape of those")
            reverse.report[at] = type(line)(line.line, "saved", line.proof, reason)


def trips_of(kept: Iterable[saved.Saved]) -> list[Node]:
    """How many steps the tapes have: all have as many as the longest."""
    return list(dict.fromkeys(one.taped.trips for one in kept if one.taped is not None))
