"""Gradient writes: merge those to one address, and turn atomic adds into stores where a proof allows it.

A write may be a store when no two programs, iterations or lanes can reach one address. The proof splits the offset into address
dimensions; in each the variables must be digits of the index, and together they must determine every program id, loop variable and
lane. That the dimensions themselves do not overlap (a row is not longer than the row stride) is checked by the host at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .affine import Affine, Group, Monomial, Var, divide, times, upper
from .ir import For, GradWrite, Graph, If, Node, walk
from .names import adjoint_name
from .reverse import LineReport, Reverse, children
from .simplify import is_zero


@dataclass
class Proof:
    """Why a write is a store, and the (stride, extent) pairs that the host has to check; extent None is the outermost."""

    text: str
    layout: list[tuple[Node, Node | None]] = field(default_factory=list)


def merge(reverse: Reverse) -> None:
    """Sum the writes that go to the same address under the same mask, at the place of the last of them."""
    _merge_list(reverse, reverse.effects)
    for effect in list(walk(reverse.effects)):
        if isinstance(effect, For):
            _merge_list(reverse, effect.effects)
        elif isinstance(effect, If):
            _merge_list(reverse, effect.then_effects)
            _merge_list(reverse, effect.other_effects)


def _merge_list(reverse: Reverse, effects: list) -> None:
    """Within one list, and across its loops over one range as far as a write needs no carry of its loop."""
    g = reverse.kernel.graph
    last: dict[tuple, tuple[GradWrite, list, For | None]] = {}
    places: list[tuple[GradWrite, list, For | None]] = [
        (e, effects, None) for e in effects if isinstance(e, GradWrite)
    ]
    for loop in effects:
        if isinstance(loop, For) and loop.cond is None:
            places += [(e, loop.effects, loop) for e in loop.effects if isinstance(e, GradWrite)]
    for write, where, loop in places:
        key = (write.base, write.offset, write.mask, loop.region if loop else None)
        if key in last:
            earlier, source, home = last[key]
            if home is not loop and home is not None and depends(earlier.value, _carried(home)):
                continue
            g.here = write.region
            write.value = g.add(earlier.value, write.value)
            source.remove(earlier)
        last[key] = (write, where, loop)
    g.here = g.top


def _carried(loop: For) -> set[Node]:
    """What has a value only inside a loop: its own carries, and those of the forward loop that it undoes."""
    both = [loop, loop.source] if loop.source is not None else [loop]
    return {carry.phi for one in both for carry in one.carries}


def depends(node: Node, wanted: set[Node]) -> bool:
    """Whether a value needs one of `wanted`, also through loops."""
    seen: set[int] = set()
    stack: list = [node]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Node) and item in wanted:
            return True
        stack.extend(children(item))
    return False


def prove(reverse: Reverse, axes: list[int]) -> None:
    """Decide store or atomic add for every write, and say why."""
    placed = list(placed_writes(reverse.effects, ()))
    for write, loops in placed:
        others = [w for w, _ in placed if w.base is write.base and w is not write]
        if any(not _exclusive(write, other) for other in others):
            reason = "several places write this gradient"
        else:
            proof = disjoint(reverse, write.offset, write.mask, loops, axes)
            if isinstance(proof, Proof):
                write.kind, write.proof, write.layout = "store", proof.text, proof.layout
                name = write.base.attrs["name"]
                reverse.report.append(
                    LineReport(
                        write.line,
                        "store",
                        proof.text,
                        f"one program owns each element of {adjoint_name(name)}",
                    )
                )
                continue
            reason = proof
        write.proof = reason
        name = write.base.attrs["name"]
        reverse.report.append(LineReport(write.line, "atomic", "none", f"gradient of {name}: {reason}"))


def placed_writes(effects: list, loops: tuple[For, ...]):
    for effect in effects:
        if isinstance(effect, GradWrite):
            yield effect, loops
        elif isinstance(effect, For):
            yield from placed_writes(effect.effects, (*loops, effect))
        elif isinstance(effect, If):
            yield from placed_writes(effect.then_effects, loops)
            yield from placed_writes(effect.other_effects, loops)


def _exclusive(a: GradWrite, b: GradWrite) -> bool:
    """Same address in two branches of one condition."""
    if a.offset is not b.offset:
        return False
    mine = {(r.cond, r.positive) for r in a.region.chain() if r.cond is not None}
    return any((r.cond, not r.positive) in mine for r in b.region.chain() if r.cond is not None)


def disjoint(
    reverse: Reverse, offset: Node, mask: Node | None, loops: tuple[For, ...], axes: list[int]
) -> Proof | str:
    """A proof that (programs x iterations x lanes) -> address is injective, or the reason why there is none."""
    g = reverse.kernel.graph
    affine = Affine(g)
    groups = affine.groups(offset)
    if groups is None:
        return "its address is not a sum of strides times indices"
    known: set[tuple[str, tuple]] = set()
    for group in groups:
        if affine.solve(group):
            for var, _ in group.terms:
                learn(var, known)
    close(affine, known, groups)
    for axis in axes:
        if ("pid", (axis,)) not in known:
            return f"its address does not determine program_id({axis})"
    for loop in loops:
        if loop.region.kind != "for":
            return "it is written inside a while loop"
        if ("trip", (id(loop.region),)) not in known:
            return f"its address does not determine the loop variable of line {loop.line}"
    lanes = {var.key[0] for group in groups if group.solved for var, _ in group.terms if var.kind == "lane"}
    for axis, dim in enumerate(offset.shape):
        if axis not in lanes and not g.is_one(dim):
            return "several lanes of a block go to one address"
    text = "digits: " + "; ".join(_group_text(affine, group) for group in groups)
    layout = layout_of(affine, g, groups, mask)
    if layout is None:
        return "the extents of its address dimensions are not known"
    return Proof(text, layout)


def learn(var: Var, known: set) -> None:
    known.add((var.kind, var.key) if var.kind not in ("floordiv", "mod") else (var.kind, (var.node.id,)))  # type: ignore[union-attr]


def close(affine: Affine, known: set, groups: list[Group]) -> None:
    """A value whose quotient and remainder by the same divisor are known is known."""
    pairs: dict[tuple, dict[str, Node]] = {}
    stack = [var.node for group in groups for var, _ in group.terms if var.node is not None]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if node.id in seen:
            continue
        seen.add(node.id)
        if node.op in ("floordiv", "mod"):
            pairs.setdefault((_plain(node.args[0]).id, node.args[1].id), {})[node.op] = node
        stack.extend(node.args)
    changed = True
    while changed:
        changed = False
        for sides in pairs.values():
            if len(sides) < 2 or not all((op, (n.id,)) in known for op, n in sides.items()):
                continue
            whole, divisor = _plain(sides["mod"].args[0]), sides["mod"].args[1]
            if not (affine.uniform(divisor) or _determined(divisor, known)):
                continue
            fact = ("pid", (whole.attrs["axis"],)) if whole.op == "pid" else (whole.op, (whole.id,))
            if fact not in known:
                known.add(fact)
                changed = True


def _determined(node: Node, known: set) -> bool:
    if node.op in ("const", "constexpr", "param", "npid"):
        return True
    if node.op == "pid":
        return ("pid", (node.attrs["axis"],)) in known
    if node.op in ("floordiv", "mod") and (node.op, (node.id,)) in known:
        return True
    return (
        bool(node.args) and node.op not in ("load", "phi") and all(_determined(a, known) for a in node.args)
    )


def _plain(node: Node) -> Node:
    while node.op == "cast":
        node = node.args[0]
    return node


def _group_text(affine: Affine, group: Group) -> str:
    names = [f"{var.node.op if var.node else 'trip'}" for var, _ in group.terms]
    return "+".join(names)


# layout: what the host checks


def layout_of(affine: Affine, g: Graph, groups: list[Group], mask: Node | None) -> list | None:
    """(stride, extent) of each address dimension, in elements; None where more than one extent is unknown."""
    if len(groups) < 2:
        return []
    bounds = bounds_of(affine, mask)
    layout: list[tuple[Node, Node | None]] = []
    for group in groups:
        lowest = group.terms[0][1]
        stride = monomial_node(affine, g, times(group.coefficient, lowest))
        layout.append((stride, _extent(affine, g, group, bounds)))
    open_ended = [stride for stride, extent in layout if extent is None]
    traced = [g.concrete(stride) for stride, _ in layout]
    if len(open_ended) > 1 or (open_ended and (None in traced or g.concrete(open_ended[0]) < max(traced))):
        return None
    layout.sort(key=lambda pair: pair[1] is None)
    return layout


def overlaps(g: Graph, layout: list[tuple[Node, Node | None]], grid: tuple[int, ...]) -> bool:
    """Whether the host's check of a layout would already fail on the traced call."""
    counts = g.launched(grid)
    known = [(g.concrete(s, counts), None if e is None else g.concrete(e, counts)) for s, e in layout]
    if any(s is None or (n is None and e is not None) for (s, n), (_, e) in zip(known, layout, strict=True)):
        return False
    reach: float = 0
    for stride, extent in sorted(((abs(s), e) for s, e in known if e is None or e > 1), key=lambda d: d[0]):
        if stride <= reach:
            return True
        reach = float("inf") if extent is None else reach + (extent - 1) * stride
    return False


def _extent(affine: Affine, g: Graph, group: Group, bounds: dict[frozenset, Node]) -> Node | None:
    """How many steps of its lowest digit an index can make: from the mask, else from its highest digit."""
    lowest = group.terms[0][1]
    for k, (_, start) in enumerate(group.terms):
        parts = [(var, divide(m, start)) for var, m in group.terms[k:]]
        bound = bounds.get(frozenset((var.kind, var.key, m) for var, m in parts))
        unit = divide(start, lowest)
        if bound is not None and unit is not None:
            return g.mul(monomial_node(affine, g, unit), bound)
    var, multiplier = group.terms[-1]
    unit = divide(multiplier, lowest)
    if unit is None:
        return None
    if var.kind == "trip" and var.region is not None:
        lo, hi, step = var.region.bounds  # type: ignore[misc]
        last = upper(g, hi)
        if last is None or not affine.uniform(step):
            return None
        digit = _start_digit(affine, group, lo, step)
        if digit is not None:
            unit = divide(digit, lowest)
            return None if unit is None else g.mul(monomial_node(affine, g, unit), last)
        count = (
            g.make("cdiv", (last, step)) if not is_zero(lo) or step.op != "const" or step.value != 1 else last
        )
        return g.mul(monomial_node(affine, g, unit), count)
    if len(group.terms) == 1 and var.node is not None and var.kind in ("vpid", "mod"):
        return var.node.attrs["count"] if var.kind == "vpid" else var.node.args[1]
    ranges = affine.ranges(var)
    return monomial_node(affine, g, times(unit, ranges[0])) if ranges else None


def _start_digit(affine: Affine, group: Group, lo: Node, step: Node) -> Monomial | None:
    """The multiplier of a loop variable that starts at a program id: then it is below the loop's end, whatever the steps are."""
    if len(group.terms) < 2 or lo.op not in ("pid", "vpid"):
        return None
    (below, digit), (_, multiplier) = group.terms[-2:]
    steps = affine.terms(step, ()).get((), {})
    if below != affine.variable(lo, ()) or len(steps) != 1:
        return None
    ((ids, factor),) = steps.items()
    return digit if times(digit, (factor, ids)) == multiplier else None


def bounds_of(affine: Affine, mask: Node | None) -> dict[frozenset, Node]:
    """Indices that a mask bounds from above: {terms of the index: bound}."""
    found: dict[frozenset, Node] = {}
    stack: list[tuple[Node, tuple[int, ...]]] = (
        [(mask, tuple(range(len(mask.shape))))] if mask is not None else []
    )
    while stack:
        node, axes = stack.pop()
        if node.op == "and":
            stack += [(a, axes[len(axes) - len(a.shape) :]) for a in node.args]
        elif node.op == "expand":
            at = node.attrs["axis"]
            stack.append((node.args[0], (*axes[:at], *axes[at + 1 :])))
        elif node.op == "broadcast":
            stack.append((node.args[0], axes[len(axes) - len(node.args[0].shape) :]))
        elif node.op == "compare" and node.attrs["cmp"] == "<":
            index, bound = node.args
            if _plain(bound).op == "minimum":  # below a minimum is below both
                halves = [
                    affine.g.make("compare", (index, b), {"cmp": "<"}, "int1") for b in _plain(bound).args
                ]
                stack += [(half, axes) for half in halves]
                continue
            difference = affine.terms(affine.g.sub(index, bound), axes)
            signature = set()
            uniform: dict[tuple[int, ...], int] = {}
            for variables, coefficients in difference.items():
                coefficients = {k: v for k, v in coefficients.items() if v}
                if not variables:
                    uniform = coefficients
                elif len(variables) == 1 and len(coefficients) == 1:
                    ((ids, factor),) = coefficients.items()
                    var = variables[0]
                    signature.add((var.kind, var.key, (factor, ids)))  # type: ignore[union-attr]
                elif coefficients:
                    break
            else:
                total = None
                for ids, factor in uniform.items():
                    term = monomial_node(affine, affine.g, (-factor, ids))
                    total = term if total is None else affine.g.add(total, term)
                if total is not None:
                    found[frozenset(signature)] = total
    return found


def monomial_node(affine: Affine, g: Graph, monomial: Monomial) -> Node:
    factor, ids = monomial
    node = g.const(factor)
    for i in ids:
        node = affine.nodes[i] if node.op == "const" and node.value == 1 else g.mul(affine.nodes[i], node)
    return node
