"""What some effects need computed: how often each value is used, which carries loops need, and where.

A value stands at its home, unless everything that uses it lies in one branch below: then it is computed there
and nowhere else.
"""

from __future__ import annotations

from collections import Counter

from ..ir.nodes import For, GradWrite, If, Node, Region, Store, TapeStore, bodies, operands


class Demand:
    """What has to be computed for some effects: use counts, and the carries each loop needs."""

    def __init__(self, effects: list) -> None:
        self.uses: Counter[Node] = Counter()
        self.seen: set[Node] = set()
        self.need: dict[For, set[int]] = {}
        self.ifs: dict[If, list[Node]] = {}
        self.work: list[Node] = []
        self.owner: dict[Node, list[tuple[For, int]]] = {}
        for effect in effects:
            self.effect(effect)
        self.drain()

    def use(self, node: Node | None) -> None:
        if node is not None:
            self.uses[node] += 1
            if node not in self.seen:
                self.seen.add(node)
                self.work.append(node)

    def drain(self) -> None:
        while self.work:
            node = self.work.pop()
            if node.op == "loopout":
                loop = node.attrs["loop"]
                self.loop(loop)
                self.carry(loop, node.attrs["index"])
            elif node.op == "ifout":
                stmt = node.attrs["if"]
                self.ifs.setdefault(stmt, []).append(node)
                self.use(stmt.cond)
                self.use(node.attrs["then"])
                self.use(node.attrs["other"])
            elif node.op == "phi":
                for loop, k in self.owner.get(node, ()):
                    self.carry(loop, k)
            else:
                for arg in (*node.args, *node.shape):
                    self.use(arg)

    def loop(self, loop: For) -> None:
        if loop in self.need:
            return
        self.need[loop] = set()
        for k, carry in enumerate(loop.carries):
            self.owner.setdefault(carry.phi, []).append((loop, k))
        for node in (*(loop.region.bounds or ()), loop.cond, *loop.provides.values(), *points(loop)):
            self.use(node)
        for store in loop.tape:
            self.effect(store)
        if loop.source is not None and loop.source.tape:
            self.loop(loop.source)
        for k, carry in enumerate(loop.carries):
            if carry.phi in self.seen and carry.phi not in loop.provides:
                self.carry(loop, k)

    def carry(self, loop: For, k: int) -> None:
        if k not in self.need[loop]:
            self.need[loop].add(k)
            carry = loop.carries[k]
            self.seen.add(carry.phi)
            self.use(carry.init)
            self.use(carry.next)

    def effect(self, effect: object) -> None:
        if isinstance(effect, (GradWrite, TapeStore)):
            for node in operands(effect):
                self.use(node)
        elif effects_of(effect):
            if isinstance(effect, For):
                self.loop(effect)
            elif isinstance(effect, If):
                self.use(effect.cond)
            for inner in (inner for body in bodies(effect) for inner in body):
                self.effect(inner)


def points(loop: For) -> list[Node]:
    """The ends of the ranges by which a loop is walked, if it has more than one."""
    return [] if loop.split is None else loop.split.points


def places(demand: Demand, effects: list, top: Region) -> dict[object, Region]:
    """Where each demanded value and loop is computed."""
    used: dict[object, Region] = {effect: top for effect in effects if effects_of(effect)}
    place: dict[object, Region] = {}
    for item in _users_first(demand, effects):
        here = used.get(item, _stands(item) or top)
        if isinstance(item, (Node, For)):
            here = _sunk(item.home if isinstance(item, Node) else item.outer, here)
        place[item] = here
        for part, region in _parts(demand, item, here):
            used[part] = region if part not in used else _common(used[part], region)
    for node in demand.seen:
        if node.op == "loopout":
            place[node] = place.get(node.attrs["loop"], node.home)
    return place


def _parts(demand: Demand, item: object, here: Region) -> list[tuple[object, Region]]:
    """What an item needs, and the region in which it needs it."""
    if isinstance(item, Node):
        if item.op == "loopout":
            return [(item.attrs["loop"], here)]
        if item.op == "ifout":
            stmt = item.attrs["if"]
            either = [(item.attrs["then"], stmt.then), (item.attrs["other"], stmt.other)]
            return [(stmt.cond, here), *((n, r) for n, r in either if n is not None)]
        return [(n, here) for n in (*item.args, *item.shape)]
    if isinstance(item, For):
        parts: list[tuple[object, Region]] = [(n, here) for n in (*(item.region.bounds or ()), *points(item))]
        for k in demand.need.get(item, ()):
            parts += [(item.carries[k].init, here), (item.carries[k].next, item.region)]
        inside = [*filter(effects_of, item.effects), *item.tape, *item.provides.values(), item.cond]
        parts += [(e, item.region) for e in inside if e is not None]
        if item.source is not None and item.source.tape:
            parts.append((item.source, here))
        return parts
    if isinstance(item, If):
        sides = [(e, item.then) for e in item.then_effects] + [(e, item.other) for e in item.other_effects]
        return [(item.cond, here), *((e, region) for e, region in sides if effects_of(e))]
    return [(n, here) for n in operands(item)]


def _users_first(demand: Demand, effects: list) -> list:
    """Everything demanded, each item after all that use it."""
    order: list = []
    state: set[int] = set()
    stack: list[tuple[object, bool]] = [(e, False) for e in effects]
    while stack:
        item, done = stack.pop()
        if done:
            order.append(item)
            continue
        if id(item) in state:
            continue
        state.add(id(item))
        stack.append((item, True))
        stack += [(part, False) for part, _ in _parts(demand, item, _stands(item))]  # type: ignore[arg-type]
    return order[::-1]


def _stands(item: object) -> Region | None:
    """Where a node, a loop, a branch or a write is."""
    return getattr(item, "home", None) or getattr(item, "outer", None) or getattr(item, "region", None)


def _common(a: Region, b: Region) -> Region:
    """The innermost region around both."""
    while a is not b:
        if a.depth >= b.depth and a.parent is not None:
            a = a.parent
        elif b.parent is not None:
            b = b.parent
    return a


def _sunk(home: Region, used: Region) -> Region:
    """From `home` towards `used`, as far as there is no loop on the way."""
    way = [region for region in used.chain() if region.inside(home)][::-1]
    here = home
    for region in way[1:]:
        if region.is_loop:
            break
        here = region
    return here


def effects_of(effect: object) -> bool:
    """Whether an effect writes anything in the backward."""
    if isinstance(effect, (For, If)):
        return any(effects_of(inner) for body in bodies(effect) for inner in body)
    return not isinstance(effect, Store)  # the forward's own stores are not repeated
