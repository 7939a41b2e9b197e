"""The reverse sweep: adjoints of a structured graph, region by region, last effect first.

A reverse loop walks the region of its forward loop. What a carry's adjoint does decides the class of the
carry, found by trying: if the adjoint comes back from the body as the same node, it does not change in the
loop (classes 0 and B): nothing is carried and the order is free. Otherwise it is a carry of the reverse loop
(classes C to G) and the loop runs backwards. Forward values are used where they are needed; `forward_values`
later decides how a reverse loop gets at forward carries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import address_tables
from ..ir.nodes import Carry, For, GradWrite, If, Node, Region, Store, adjoint_dtype, operands, walk
from ..ir.refusal import Refusal
from ..ir.report import LineReport
from ..ir.values import Kernel, loop_out
from .rules import adjoint, unbroadcast


@dataclass
class Reverse:
    """The reverse sweep of one kernel: effects in order, and what was decided."""

    kernel: Kernel
    detached: set[Node]
    effects: list = field(default_factory=list)
    report: list[LineReport] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # operations whose adjoint was taken

    def run(self) -> Reverse:
        g = self.kernel.graph
        g.reverse = True
        g.here = g.top
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
            table = adj if node.home is region and node.op != "phi" else external
            old = table.get(node)
            table[node] = contribution if old is None else g.add(old, contribution)

        for node, d in seeds.items():
            add(node, d)
        out: list = []
        pending: dict[object, dict[Node, Node]] = {}
        for item in reversed(self.order(region, effects, seeds)):
            if isinstance(item, Store):
                self.upstream(item, add)
            elif isinstance(item, For):
                reverse_loop, contributions = self.loop(item, pending.pop(item, {}))
                if reverse_loop is not None:
                    out.append(reverse_loop)
                for node, d in contributions.items():
                    add(node, d)
            elif isinstance(item, If):
                reverse_if, contributions = self.branches(item, pending.pop(item, {}))
                if reverse_if is not None:
                    out.append(reverse_if)
                for node, d in contributions.items():
                    add(node, d)
            else:
                d = adj.pop(item, None)  # type: ignore[arg-type]
                if d is None:
                    continue
                if d.hint is None and item.hint and d.op not in ("const", "full", "iv"):
                    d.hint, d.line = "d_" + item.hint, item.line
                if item.op == "loopout":
                    pending.setdefault(item.attrs["loop"], {})[item] = d
                elif item.op == "ifout":
                    pending.setdefault(item.attrs["if"], {})[item] = d
                elif item.op == "load":
                    self.load(item, d, region, out, add)
                else:
                    g.line = item.line
                    self.used.add(item.attrs.get("fn", item.op) if item.op in ("call", "reduce") else item.op)
                    for arg, contribution in adjoint(g, item, d):
                        add(arg, contribution)
        return out, external

    def order(self, region: Region, effects: list, seeds: dict[Node, Node]) -> list:
        """Nodes and effects of one region, arguments before what uses them."""
        done: dict[object, bool] = {}
        result: list = []
        stack: list[tuple[object, bool]] = []

        def visit(root: object) -> None:
            stack.append((root, False))
            while stack:
                item, ready = stack.pop()
                if ready:
                    result.append(item)
                    continue
                if item in done:
                    continue
                if isinstance(item, Node) and item.home is not region:
                    continue
                done[item] = True
                stack.append((item, True))
                for child in children(item):
                    if child not in done:
                        stack.append((child, False))

        for effect in effects:
            visit(effect)
        for node in seeds:
            visit(node)
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
            out.append(
                GradWrite(address_tables.entry_of(g, base, "gradient"), offset, mask, d, region, node.line)
            )
        if len(rest) == 2 and rest[1].active:
            add(rest[1], g.where(mask, g.number(0), d))  # type: ignore[arg-type]

    # if

    def branches(self, stmt: If, d_outs: dict[Node, Node]) -> tuple[If | None, dict[Node, Node]]:
        g = self.kernel.graph
        outer = g.here
        result = If(stmt.cond, stmt.then, stmt.other, outer=outer, static=stmt.static, line=stmt.line)
        sides = []
        for region, effects, key in (
            (stmt.then, stmt.then_effects, "then"),
            (stmt.other, stmt.other_effects, "other"),
        ):
            seeds: dict[Node, Node] = {}
            for node, d in d_outs.items():
                value = node.attrs[key]
                if value is not None and value.active:
                    seeds[value] = g.add(seeds[value], d) if value in seeds else d
            g.here = region
            sides.append(self.region(region, effects, seeds))
            g.here = outer
        result.then_effects, result.other_effects = sides[0][0], sides[1][0]
        contributions: dict[Node, Node] = {}
        for node in {**sides[0][1], **sides[1][1]}:
            parts = [side[1].get(node) for side in sides]
            if parts[0] is not None and parts[0] is parts[1]:
                contributions[node] = parts[0]
                continue
            zero = g.zeros(node.shape, adjoint_dtype(node.dtype))
            then, other = (zero if part is None else part for part in parts)
            attrs = {"then": then, "other": other, "if": result}
            out = g.fresh("ifout", attrs, then.dtype, node.shape, outer, (stmt.cond,))
            out.upstream = True
            out.hint = "d_" + (node.hint or "value")
            result.outs.append(out)
            contributions[node] = out
        used = result.then_effects or result.other_effects or result.outs
        return (result if used else None), contributions

    # loops

    def loop(self, loop: For, d_outs: dict[Node, Node]) -> tuple[For | None, dict[Node, Node]]:
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
                    dtype = adjoint_dtype(carry.phi.dtype)
                    d = phis[k] = g.fresh(
                        "phi", {"name": f"d_{carry.phi.hint}"}, dtype, carry.phi.shape, loop.region
                    )
                    d.hint, d.upstream, d.reverse = f"d_{carry.phi.hint}", True, True
                if d is not None and carry.next is not None and carry.next.active:
                    seeds[carry.next] = g.add(seeds[carry.next], d) if carry.next in seeds else d
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
        contributions = self._finish(loop, result, incoming, carried, phis, back, external)
        self._report(loop, carried, incoming)
        used = result.carries or result.effects
        return (result if used else None), contributions

    def _finish(
        self, loop: For, result: For, incoming: dict, carried: set, phis: dict, back: dict, external: dict
    ) -> dict[Node, Node]:
        g = self.kernel.graph
        contributions: dict[Node, Node] = {}

        def contribute(node: Node, d: Node) -> None:
            contributions[node] = g.add(contributions[node], d) if node in contributions else d

        for k, carry in enumerate(loop.carries):
            if k not in carried:
                if k in incoming:
                    contribute(carry.init, incoming[k])
                continue
            phi = phis[k]
            zero = g.zeros(phi.shape, phi.dtype)
            init = incoming.get(k, zero)
            result.carries.append(Carry(phi, init, back[k] if back[k] is not None else zero))
            out = loop_out(g, result, len(result.carries) - 1)
            out.upstream = True
            if carry.init.active:
                contribute(carry.init, out)
        for node, d in external.items():
            g.here = loop.region
            name = f"d_{node.hint}" if node.hint else "d_sum"
            acc = g.fresh("phi", {"name": name}, d.dtype, d.shape, loop.region)
            acc.hint, acc.upstream = name, True
            total = g.add(acc, d)
            g.here = result.outer
            result.carries.append(Carry(acc, g.zeros(d.shape, d.dtype), total))
            out = loop_out(g, result, len(result.carries) - 1)
            out.upstream, out.line = True, node.line
            contribute(node, out)
        if carried:
            if loop.region.kind == "while":
                raise Refusal(
                    "while",
                    "a while loop with differentiable state cannot be run backwards",
                    "Use a loop over a range.",
                    loop.line,
                )
            result.order = "reverse"
        return contributions

    def _report(self, loop: For, carried: set, incoming: dict) -> None:
        for k, carry in enumerate(loop.carries):
            if not carry.phi.active or carry.phi in self.detached:
                continue
            if k in carried:
                kind, reason = "C-G", "its adjoint changes from step to step: the reverse loop runs backwards"
            elif k in incoming:
                kind, reason = "B", "its adjoint does not change in the loop: no tape, any order"
            else:
                continue
            self.report.append(LineReport(loop.line, kind, "structure", f"`{carry.phi.hint}`: {reason}"))


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
        return [n for n in _free([*roots, *item.effects], item.region) if n is not None]
    if isinstance(item, If):
        roots = [n for out in item.outs for n in (out.attrs["then"], out.attrs["other"])]
        effects = [*item.then_effects, *item.other_effects]
        return [item.cond, *_free([*roots, *effects], item.then, item.other)]
    return []


def _free(roots: list, *regions: Region) -> list:
    """Nodes and effects outside `regions` that `roots` depend on."""
    seen: set[int] = set()
    out: list = []
    stack = [r for r in roots if r is not None]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Node):
            if not any(item.home.inside(region) for region in regions):
                out.append(item)
                continue
        elif (
            isinstance(item, (For, If))
            and item.outer is not None
            and not any(item.outer.inside(r) for r in regions)
        ):
            out.append(item)
            continue
        stack.extend(children(item))
    return out


def writes(effects: list) -> list[GradWrite]:
    return [e for e in walk(effects) if isinstance(e, GradWrite)]
