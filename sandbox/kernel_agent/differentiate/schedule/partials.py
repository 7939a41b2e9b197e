"""Private partial sums: a few programs walk the summed axis, and sum in registers what many would add.

The forward's programs along the axes that the address of such a gradient does not contain become the
iterations of one loop (strip-mining): P programs share them, keep the sums in registers, store a private row
each, and a second kernel adds the P rows. All of the backward happens in that loop, so that every input is
read once. Where the sums are over different axes, the loop walks those that all have in common: of a sum over
more of them, the programs along the others have private rows too. Offered is the same beside gradients that
programs add to at places that data says, as at those of an embedding: they still do, in that loop.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.names import adjoint_name
from ..ir.nodes import Carry, For, GradWrite, Node, Region, bodies, nodes_in, sides, walk
from ..ir.report import Why
from ..ir.transplant import Graft
from ..ir.values import is_static, loop_out
from ..prove.affine import Affine
from ..prove.cover import reached
from ..prove.masks import parts
from ..reverse.sweep import Reverse, writes

REGISTERS = 32768  # elements of the sums that one program may keep
# Measured on an H200 (bench/results/gpu-h200.json): a dynamic tanh of 8192 x 4096 in bfloat16 takes 80 us
# with three stages and 256 programs in all, 131 with 512 and one, 108 with 512 and three; an RMS norm
# 64 with three, 66 with four, 80 with two, 92 with one.
AHEAD = 3
SHARED = 98304  # bytes of what is loaded ahead, as float32: what one program has on most GPUs


@dataclass
class Partials:
    """What the host has to know: strip-mined axes, gradients with private rows, the note above the kernel."""

    axes: list[int]
    bases: dict[str, list[int]]  # and the other axes along which each program has a row
    covers: dict[str, Node]  # how many elements of a row are written, where that is known
    optional: bool  # whether a gradient may be None
    note: str


@dataclass
class _Sums:
    """The writes that are summed, the program axes that each address lacks, and those that all lack."""

    writes: list[GradWrite]
    missing: dict[str, list[int]]
    common: list[int]


def beside_data(reverse: Reverse, axes: list[int]) -> bool:
    """Whether some gradients could be summed so while others, at places that data says, are added to."""
    return isinstance(_sums(reverse, axes, False), Why) and isinstance(_sums(reverse, axes, True), _Sums)


def _sums(reverse: Reverse, axes: list[int], data: bool) -> _Sums | Why:
    """What may be summed; `data`: what is written at places that data says stays as it is."""
    added = [w for w in writes(reverse.effects) if w.kind == "atomic_add"]
    if not added:
        return Why("asked", "nothing is added to by several programs")
    if reverse.kernel.inplace or any(_backwards(e) for e in walk(reverse.effects)):
        return Why("reverse", "the kernel overwrites its input, or walks a loop backwards")
    missing: dict[str, list[int]] = {}
    left: set[Node] = set()
    for write in added:
        summed = _summed(reverse, write, axes)
        if isinstance(summed, Why) and summed.kind == "data" and data:
            left.add(write.base)
        elif isinstance(summed, Why):
            return summed
        elif missing.setdefault(write.base.attrs["name"], summed) != summed:
            return Why("shared", "the writes of one gradient are sums over different axes")
    added = [write for write in added if write.base not in left]
    if any(_branches(write) for write in added) and _undefined(reverse.effects):
        return Why("inner", "what only one branch defines cannot leave the walk")
    missing = {write.base.attrs["name"]: missing[write.base.attrs["name"]] for write in added}
    common = [axis for axis in axes if missing and all(axis in found for found in missing.values())]
    if not common:
        return Why("shared", "its gradients are sums over different axes")
    if not all(_meets_none(w, added) for w in added):
        return Why("several", "several places write one gradient")
    return _Sums(added, missing, common)


def fuse(reverse: Reverse, axes: list[int], data: bool = False) -> Partials | Why:
    """Strip-mine the main kernel if all its atomic adds are sums over the same axes, with `data` all but
    those to places that data says; else says why not."""
    sums = _sums(reverse, axes, data)
    if isinstance(sums, Why):
        return sums
    added, missing, stripped = sums.writes, sums.missing, sums.common
    g = reverse.kernel.graph
    if sum(g.elements(_held(write).shape) for write in added) > REGISTERS:
        return Why("shared", "the sums do not fit into registers")
    others = {base: [axis for axis in found if axis not in stripped] for base, found in missing.items()}
    covers = {w.base.attrs["name"]: found for w in added if (found := _covers(reverse, w, added, stripped))}
    _strip(reverse, added, stripped, others)
    names = ", ".join(dict.fromkeys(adjoint_name(w.base.attrs["name"]) for w in added))
    how = "summed in registers by a few programs, a private row each"
    for write in added:
        reverse.say(write.line, "partials", "affine nest", f"{adjoint_name(write.base.attrs['name'])}: {how}")
    walked = f"each program walks a share of {', '.join(f'program_id({a})' for a in stripped)}"
    note = f"{walked} and keeps {names} in registers; sum_partials adds their rows"
    return Partials(stripped, others, covers, any(w.region is not g.top for w in added), note)


def _covers(reverse: Reverse, write: GradWrite, added: list[GradWrite], axes: list[int]) -> Node | None:
    """How many elements of a private row are written, whatever a program walks; None where unknown."""
    if sum(w.base is write.base for w in added) > 1:
        return None
    g = reverse.kernel.graph
    affine = Affine(g)
    groups = affine.solved(write.offset)
    kept = functools.reduce(g.both, (p for p in parts(write.mask) if not varies(p, axes)), None)
    covers = None if groups is None else reached(affine, g, groups, write.offset, kept)
    for region in _branches(write):
        if covers is not None and region.cond is not None:
            none = g.const(0)
            covers = g.where(region.cond, *((covers, none) if region.positive else (none, covers)))
    return covers


def _meets_none(write: GradWrite, added: list[GradWrite]) -> bool:
    """Whether a write is the only one to its gradient, or all of them go to elements of fixed numbers."""
    fixed = [w.offset.value for w in added if w.base is write.base and w.offset.op == "const"]
    mine = [w for w in added if w.base is write.base]
    return len(mine) == 1 or len(mine) == len(set(fixed))


def _backwards(effect: object) -> bool:
    return isinstance(effect, For) and (effect.order == "reverse" or effect.region.kind != "for")


def _summed(reverse: Reverse, write: GradWrite, axes: list[int]) -> list[int] | Why:
    """The program axes that an address does not contain."""
    g = reverse.kernel.graph
    if not all(region.cond is not None and is_static(region.cond) for region in _branches(write)):
        return Why("inner", "a sum in a loop or a branch is not kept in registers")
    nodes = set(nodes_in([write.offset]))
    data = next((n for n in nodes if n.op in ("load", "random", "loopout", "ifout")), None)
    if data is not None:
        return Why("data", f"its address depends on data (line {data.line})")
    affine = Affine(g)
    groups = affine.solved(write.offset)
    if groups is None:
        return Why("mixed", "its address mixes indices in one dimension")
    terms = [var for group in groups for var, _ in group.terms]
    if any(var.kind not in ("pid", "lane") for var in terms):
        return Why("mixed", "its address is no plain sum of program ids and lanes")
    lanes = {var.key[0] for var in terms if var.kind == "lane"}
    if any(axis not in lanes and not g.is_one(dim) for axis, dim in enumerate(write.offset.shape)):
        return Why("lanes", "several lanes of a block go to one address")
    held = {n.attrs["axis"] for n in nodes if n.op == "pid"}
    missing = [axis for axis in axes if axis not in held]
    if not missing:
        return Why("shared", "its address contains every program id")
    for part in parts(write.mask):
        if varies(part, missing) and any(not g.is_one(dim) for dim in part.shape):
            return Why("extent", "which lanes it writes differs from program to program")
    return missing


def _held(write: GradWrite) -> Node:
    """What a program sums up: the value, or where that is a sum over lanes, what it is a sum of."""
    value = write.value
    lanes = value.op == "reduce" and value.attrs["fn"] == "sum" and write.mask is None
    plain = lanes and value.dtype == value.args[0].dtype == "float32"
    return value.args[0] if plain else value


def _undefined(effects: list) -> bool:
    """Whether only one side of a branch defines some value: outside the walk no branch guards it."""
    return any(node.op == "ifout" and len(sides(node)) < 2 for node in nodes_in(effects))


def _branches(write: GradWrite) -> list[Region]:
    """The loops and branches around a write, inner ones first."""
    return [region for region in write.region.chain() if region.kind != "top"]


def varies(node: Node, axes: list[int]) -> bool:
    """Whether a value may differ between programs along some of `axes`."""
    return any(n.op == "pid" and n.attrs["axis"] in axes for n in nodes_in([node]))


def _strip(reverse: Reverse, added: list[GradWrite], axes: list[int], others: dict[str, list[int]]) -> None:
    """Put all effects into one loop over the programs along `axes`; the sums are its carries."""
    g = reverse.kernel.graph
    g.here, g.reverse = g.top, True
    first = g.pid(axes[0])
    counts = {a: g.param(f"grid_{a}") for a in axes}
    total = functools.reduce(g.mul, counts.values())
    region = g.loop_region(first, total, g.npid(axes[0]), "range", None)
    assert region.iv is not None
    region.iv.hint = first.hint or "program"
    loop = For(region, g.top, order="forward")
    graft = Graft(g, _ids(g, region.iv, axes, counts, region), region)
    for axis in axes:  # the kernel itself has fewer programs than the forward
        graft.table[g.npid(axis)] = counts[axis]
    stores = [_sum(g, graft, loop, write, axes, others[write.base.attrs["name"]]) for write in added]
    _remove(reverse.effects, {id(write) for write in added})
    loop.effects = [graft.effect(effect) for effect in reverse.effects]
    g.here = g.top
    reverse.effects = [loop, *stores]
    loop.region.stages = _stages(g, loop, reverse.effects)


def _stages(g: Graph, loop: For, effects: list) -> str:
    """How many turns ahead the blocks are loaded, where the walk is the only loop and has few of them."""
    if any(isinstance(effect, For) and effect is not loop for effect in walk(effects)):
        return ""
    loads = {n for n in nodes_in(effects) if n.op == "load" and n.home.inside(loop.region)}
    held = bytes_text(g, ((load.shape, AHEAD * 4) for load in loads))
    return f"{AHEAD} if {held} <= {SHARED} else 1" if held else ""


def bytes_text(g: Graph, blocks: Iterable[tuple[tuple, int]]) -> str:
    """How many bytes blocks have together, for a kernel: of shapes, with the bytes for an element. Empty
    where a size is computed, or there are none."""
    bytes_of: Counter[str] = Counter()
    for shape, each in blocks:
        sizes = [dim for dim in shape if not g.is_one(dim)]
        if any(dim.op not in ("const", "constexpr") for dim in sizes):
            return ""
        if sizes:
            names = [str(dim.value) if dim.op == "const" else dim.attrs["name"] for dim in sizes]
            bytes_of[" * ".join(names)] += each
    return " + ".join(f"{count} * {size}" for size, count in sorted(bytes_of.items()))


def _remove(effects: list, gone: set[int]) -> None:
    effects[:] = [effect for effect in effects if id(effect) not in gone]
    for body in (body for effect in effects for body in bodies(effect)):
        _remove(body, gone)


def _ids(g: Graph, iv: Node, axes: list[int], counts: dict[int, Node], region) -> dict[Node, Node]:
    """The forward's program ids in terms of the loop variable: its digits, the last axis the lowest."""
    table: dict[Node, Node] = {}
    g.here, rest = region, iv
    for axis in reversed(axes[1:]):
        table[g.pid(axis)] = g.make("mod", (rest, counts[axis]))
        rest = g.make("floordiv", (rest, counts[axis]))
    table[g.pid(axes[0])] = rest
    g.here = g.top
    return table


def _sum(g: Graph, graft: Graft, loop: For, write: GradWrite, axes: list[int], others: list[int]) -> object:
    """One sum as a carry of the loop, and its store to the program's own row."""
    name = write.base.attrs["name"]
    branches = [graft.region(region) for region in _branches(write)]
    inside = branches[0] if branches else loop.region
    value, kept = graft.node(write.value), None
    # A sum over lanes waits until the end: every turn adds block to block.
    lanes = value if _held(write) is not write.value else None
    value = value if lanes is None else lanes.args[0]
    for part in parts(write.mask):
        if varies(part, axes):
            with g.at(inside):
                value = g.where(graft.node(part), value, g.number(0))
        else:
            kept = g.both(kept, part)
    with g.at(loop.region):
        phi = g.adjoint_carry(f"{adjoint_name(name)}_sum", value, loop.region)
    assert phi.is_float
    with g.at(inside):
        total = g.add(phi, value)
    for region in branches:
        with g.at(region.parent):  # type: ignore[arg-type]
            stmt = g.fork(region.cond, static=True)  # type: ignore[arg-type]
            then, other = (total, phi) if region.positive else (phi, total)
            total = g.merged(stmt, then, other, phi, g.here)
    loop.carries.append(Carry(phi, g.zeros(phi.shape, phi.dtype), total))
    g.here = g.top
    out = loop_out(g, loop, len(loop.carries) - 1)
    out.upstream = True
    if lanes is not None:
        out = g.again(lanes, [out])
    row = g.pid(axes[0])
    for axis in others:
        row = g.add(g.mul(row, g.npid(axis)), g.pid(axis))
    offset = g.add(g.mul(g.cast(row, "int64"), g.param(f"span_{name}")), write.offset)
    stored: object = GradWrite(
        write.base, offset, kept, out, write.region, write.line, "store", "private rows"
    )
    for region in _branches(write):
        with g.at(region.parent):  # type: ignore[arg-type]
            stmt = g.fork(region.cond, static=True)  # type: ignore[arg-type]
        (stmt.then_effects if region.positive else stmt.other_effects).append(stored)
        stored = stmt
    return stored
