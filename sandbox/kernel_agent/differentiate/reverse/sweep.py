"""The reverse sweep: adjoints of a structured graph, region by region, last effect first.

A reverse loop walks the region of its forward loop. What a carry's adjoint does decides the class of the
carry, found by trying: if the adjoint comes back from the body as the same node, it does not change in the
loop (classes 0 and B): nothing is carried and the order is free. Otherwise it is a carry of the reverse loop
(classes C to G) and the loop runs backwards. Forward values are used where they are needed; `forward_values`
later decides how a reverse loop gets at forward carries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..ir import address_tables
from ..ir.graph import Graph
from ..ir.nodes import (
    Carry,
    For,
    GradWrite,
    If,
    Node,
    Region,
    Store,
    adjoint_dtype,
    operands,
    reachable,
    walk,
)
from ..ir.refusal import Refusal
from ..ir.report import LineReport
from ..ir.values import Kernel, loop_out
from . import saturation, winners
from .rules import adjoint, unbroadcast


@dataclass
class Reverse:
    """The reverse sweep of one kernel: effects in order, and what was decided."""

    kernel: Kernel
    detached: set[Node]
    effects: list = field(default_factory=list)
    report: list[LineReport] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # operations whose adjoint was taken
    won: dict[Node, winners.Won] = field(default_factory=dict)
    exact: bool = False  # nothing is read back that an output holds rounded
    rounded: bool = False  # something is

    def run(self) -> Reverse:
        g = self.kernel.graph
        g.reverse = True
        g.here = g.top
        self.won = winners.find(self.kernel)
        g.saturated = saturation.find(self.kernel)
        for choice in self.won:
            self.say(choice.line, "won", "structure", "a number tells the step that is chosen: no tape")
        self.effects, external = self.region(g.top, self.kernel.effects, {})
        assert not external, "adjoints left over at the top of the kernel"
        return self

    # one region

    def region(self, region: Region, effects: list, seeds: dict[Node, Node]) -> tuple[list, dict[Node, Node]]:
        """Reverse what is homed in `region`; returns its effects and the adjoints of values from outside."""
        g = self.kernel.graph
        adj: dict[Node, Node] = {}
        external: dict[Node, Node] = {}

        def add(node: Node, contribution: Node) -> None:
            if not node.active or node in self.detached:
                return
            contribution = unbroadcast(g, contribution, node.shape)
            if contribution.shape != node.shape:
                contribution = g.broadcast(contribution, node.shape)
            wanted = adjoint_dtype(node.dtype)
            if contribution.dtype != wanted:
                contribution = g.cast(contribution, wanted)
            add_to(g, adj if node.home is region and node.op != "phi" else external, node, contribution)

        for node, d in seeds.items():
            add(node, d)
        out: list = []
        pending: dict[object, dict[Node, Node]] = {}
        for item in reversed(self.order(region, effects, seeds)):
            if isinstance(item, Store):
                self.upstream(item, add)
            elif isinstance(item, (For, If)):
                given = pending.pop(item, {})
                effect, contributions = (
                    self.loop(item, given) if isinstance(item, For) else self.branches(item, given)
                )
                out += [effect] * (effect is not None)
                for node, d in contributions.items():
                    add(node, d)
            elif (d := adj.pop(item, None)) is not None:  # type: ignore[arg-type]
                if d.hint is None and item.hint and d.op not in ("const", "full", "iv"):
                    d.hint, d.line = "d_" + item.hint, item.line
                if item.op in ("loopout", "ifout"):
                    pending.setdefault(item.attrs[item.op.removesuffix("out")], {})[item] = d
                elif item.op == "load":
                    self.load(item, d, region, out, add)
                else:
                    g.line = item.line
                    self.used.add(item.attrs.get("fn", item.op) if item.op in ("call", "reduce") else item.op)
                    parts = self.of_one_step(item, d) if item in self.won else adjoint(g, item, d)
                    for arg, contribution in parts:
                        add(arg, contribution)
        return out, external

    def of_one_step(self, item: Node, d: Node) -> list[tuple[Node, Node]]:
        """The adjoint of what a loop chooses goes to the step that it is from; all steps have the same."""
        g, won = self.kernel.graph, self.won[item]
        number, shape = won.number, won.last.shape
        number = number if number.shape == shape else g.broadcast(number, shape)
        return [
            (item.args[1], g.where(g.compare("==", won.last, number), d, g.number(0))),
            (item.args[2], d),
        ]

    def order(self, region: Region, effects: list, seeds: dict[Node, Node]) -> list:
        """Nodes and effects of one region, arguments before what uses them."""
        done: set[object] = set()
        result: list = []
        for root in (*effects, *seeds):
            stack: list[tuple[object, bool]] = [(root, False)]
            while stack:
                item, ready = stack.pop()
                if ready:
                    result.append(item)
                elif item not in done and not (isinstance(item, Node) and item.home is not region):
                    done.add(item)
                    stack.append((item, True))
                    stack += [(child, False) for child in children(item) if child not in done]
        return [i for i in result if not isinstance(i, Node) or (i.active and i not in self.detached)]

    def upstream(self, store: Store, add) -> None:
        g = self.kernel.graph
        if not store.value.active or not store.base.active:
            return
        g.line = store.line
        args = [address_tables.entry_of(g, store.base, "upstream"), store.offset]
        attrs = {"other": store.mask is not None, "upstream": True}
        if store.mask is not None:
            args += [store.mask, g.number(0)]
        elem = store.base.attrs["elem"]
        dtype = elem if store.base.op == "entry" else f"${elem}:d_{store.base.attrs['name']}"
        raw = g.make("load", args, attrs, dtype, store.value.shape)
        raw.upstream = True
        d = g.cast(raw, adjoint_dtype(dtype))
        d.upstream = True
        add(store.value, d)

    def load(self, node: Node, d: Node, region: Region, out: list, add) -> None:
        g = self.kernel.graph
        base, offset, *rest = node.args
        mask = rest[0] if rest else None
        if base.active:
            if d.shape != node.shape:
                d = g.broadcast(d, node.shape)
            target = address_tables.entry_of(g, base, "gradient")
            out.append(GradWrite(target, offset, mask, d, region, node.line))
        if len(rest) == 2 and rest[1].active:
            add(rest[1], g.where(rest[0], g.number(0), d))

    # if

    def branches(self, stmt: If, d_outs: dict[Node, Node]) -> tuple[For | If | None, dict[Node, Node]]:
        g = self.kernel.graph
        result = replace(stmt, then_effects=[], other_effects=[], outer=g.here, outs=[])
        found = []
        for region, effects, key in (
            (stmt.then, stmt.then_effects, "then"),
            (stmt.other, stmt.other_effects, "other"),
        ):
            seeds: dict[Node, Node] = {}
            for node, d in d_outs.items():
                value = node.attrs[key]
                if value is not None and value.active:
                    add_to(g, seeds, value, d)
            with g.at(region):
                found.append(self.region(region, effects, seeds))
        (result.then_effects, then), (result.other_effects, other) = found
        contributions: dict[Node, Node] = {}
        for node in {**then, **other}:
            a, b = then.get(node), other.get(node)
            if a is not None and a is b:
                contributions[node] = a
                continue
            zero = g.zeros(node.shape, adjoint_dtype(node.dtype))
            out = contributions[node] = g.merged(result, a or zero, b or zero, a or zero, g.here)
            out.upstream, out.hint, out.line = True, "d_" + (node.hint or "value"), g.line
        used = result.then_effects or result.other_effects or result.outs
        return (result if used else None), contributions

    # loops

    def loop(self, loop: For, d_outs: dict[Node, Node]) -> tuple[For | If | None, dict[Node, Node]]:
        g = self.kernel.graph
        outer = g.here
        incoming = {node.attrs["index"]: d for node, d in d_outs.items()}
        carried: set[int] = set()
        while True:
            result = For(loop.region, outer, order="any", cond=loop.cond, line=loop.line, source=loop)
            g.here = loop.region
            seeds: dict[Node, Node] = {}
            phis: dict[int, Node] = {}
            for k, carry in enumerate(loop.carries):
                d = incoming.get(k)
                if k in carried:
                    d = phis[k] = g.adjoint_carry(f"d_{carry.phi.hint}", carry.phi, loop.region)
                    d.dtype = adjoint_dtype(carry.phi.dtype)
                if d is not None and carry.next is not None and carry.next.active:
                    add_to(g, seeds, carry.next, d)
            result.effects, external = self.region(loop.region, loop.effects, seeds)
            back = {k: external.pop(carry.phi, None) for k, carry in enumerate(loop.carries)}
            changed = {
                k for k, d in back.items() if k not in carried and d is not None and d is not incoming.get(k)
            }
            lost = {k for k in incoming if k not in carried and back[k] is None}
            if not changed | lost:
                break
            carried |= changed | lost
        g.here = outer
        contributions = self._finish(loop, result, incoming, phis, back, external)
        self._report(loop, carried, incoming)
        return (result if result.carries or result.effects else None), contributions

    def _finish(
        self, loop: For, result: For, incoming: dict, phis: dict[int, Node], back: dict, external: dict
    ) -> dict[Node, Node]:
        g = self.kernel.graph
        contributions: dict[Node, Node] = {}

        def carry_on(phi: Node, init: Node, after: Node) -> Node:
            result.carries.append(Carry(phi, init, after))
            out = loop_out(g, result, len(result.carries) - 1)
            out.upstream = True
            return out

        for k, carry in enumerate(loop.carries):
            if k in phis:
                zero = g.zeros(phis[k].shape, phis[k].dtype)
                out = carry_on(phis[k], incoming.get(k, zero), back[k] or zero)
                if carry.init.active:
                    add_to(g, contributions, carry.init, out)
            elif k in incoming:
                add_to(g, contributions, carry.init, incoming[k])
        for node, d in external.items():
            with g.at(loop.region):
                acc = g.adjoint_carry(f"d_{node.hint}" if node.hint else "d_sum", d, loop.region)
                total = g.add(acc, d)
            out = carry_on(acc, g.zeros(d.shape, d.dtype), total)
            out.line = node.line
            add_to(g, contributions, node, out)
        if phis and loop.region.kind == "while":
            message = "a while loop with differentiable state cannot be run backwards"
            raise Refusal("while", message, "Use a loop over a range.", loop.line)
        if phis:
            result.order = "reverse"
        return contributions

    def say(self, line: int | None, kind: str, proof: str, reason: str) -> None:
        """A line of the report."""
        self.report.append(LineReport(line, kind, proof, reason))

    def _report(self, loop: For, carried: set, incoming: dict) -> None:
        for k, carry in enumerate(loop.carries):
            if not carry.phi.active or carry.phi in self.detached:
                continue
            name = f"`{carry.phi.hint}`: its adjoint"
            if k in carried:
                reason = f"{name} changes from step to step: the reverse loop runs backwards"
                self.say(loop.line, "C-G", "structure", reason)
            elif k in incoming:
                self.say(
                    loop.line, "B", "structure", f"{name} does not change in the loop: no tape, any order"
                )


def add_to(g: Graph, table: dict[Node, Node], node: Node, d: Node) -> None:
    """One more contribution to the adjoint of a value."""
    table[node] = g.add(table[node], d) if node in table else d


def children(item: object) -> list:
    """What must come before a node or an effect, through loops and branches."""
    if isinstance(item, Node):
        if item.op == "loopout":
            return [item.attrs["loop"]]
        if item.op == "ifout":
            return [*item.args, item.attrs["if"]]
        return [*item.args, *item.shape]
    if isinstance(item, (Store, GradWrite)):
        return operands(item)
    if isinstance(item, For):
        bounds = item.region.bounds or ()
        roots = [n for c in item.carries for n in (c.init, c.next)] + list(bounds) + [item.cond]
        return _free([*roots, *item.effects], item.region)
    if isinstance(item, If):
        roots = [n for out in item.outs for n in (out.attrs["then"], out.attrs["other"])]
        effects = [*item.then_effects, *item.other_effects]
        return [item.cond, *_free([*roots, *effects], item.then, item.other)]
    return []


def _free(roots: list, *regions: Region) -> list:
    """Nodes and effects outside `regions` that `roots` depend on."""

    def outside(item: object) -> bool:
        home = getattr(item, "home", None) or getattr(item, "outer", None)
        return home is not None and not any(home.inside(region) for region in regions)

    found = reachable(
        (r for r in roots if r is not None), lambda item: [] if outside(item) else children(item)
    )
    return [item for item in found if outside(item)]


def writes(effects: list) -> list[GradWrite]:
    return [e for e in walk(effects) if isinstance(e, GradWrite)]
